"""Updates on the device that fail, also behind their step: nothing of them is lost, and no error keeps memory alive."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetmem
from hetmem import testing
from tests.engine.harness import assert_same_states, assert_same_weights, loss_of, token_batches
from tests.optim.keeping import LAYERS, ODD, batches, both
from tests.optim.test_streamed import SLOW_HOST, assert_alike, train, trained


class LinkError(RuntimeError):
    """May be referred to weakly."""


class Broken:
    """While it is `on`, calls at `point` fail, but for the first `spared`; each waits for `told` before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: str | tuple[Any, str], spared: int = 0) -> None:
        owner, name = testing.place_of(point) if isinstance(point, str) else point
        self.on, self.calls, self.failed, self._spared = False, 0, 0, spared
        self.told = threading.Event()
        self._lock = threading.Lock()
        original = getattr(owner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            with self._lock:
                fails = self.on and self._spared <= 0
                self._spared -= self.on
                self.calls += 1
                self.failed += fails
            if fails:
                assert self.told.wait(60)
                raise LinkError("the link has failed")
            return original(*args, **keywords)

        monkeypatch.setattr(owner, name, call)


def attempts(call: Callable[[], Any], broken: Broken) -> int:
    """How often `call` had to be made: while `broken` is on it raises, and then no more."""
    for number in range(1, 50):
        try:
            call()
            return number
        except LinkError:  # noqa: PERF203 - each may fail
            broken.on = number < 2
    raise AssertionError("it never ends")


WAITS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "forward": lambda model, optimizer: model(*token_batches(1)[0]),
    "weights": lambda model, optimizer: [parameter.sum() for parameter in model.parameters()],
}


@pytest.mark.each
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("part", ["bring", "host"])
@pytest.mark.parametrize("spared", [0, 2])
def test_an_update_that_fails_behind_its_step_is_made_for_whoever_waits_again(
    spared: int, part: str, wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = trained(4, tmp_path, None), trained(4, tmp_path, SLOW_HOST, overlap="forward")
    found[1].synchronize()
    broken = Broken(monkeypatch, "states to the device" if part == "bring" else "update there", spared)
    if part == "host":
        broken.told.set()
        hold = Broken(monkeypatch, "states to the device")  # until the step is over nothing has a slot
        owner, name = testing.place_of("states to the device")
        monkeypatch.setattr(owner, name, _held(hold.told, getattr(owner, name)))
    train(*expected, 1)
    managed, optimizer = found
    output = managed(*token_batches(1)[0])
    broken.on = part == "bring"
    output.backward()
    optimizer.step()
    optimizer.zero_grad()
    broken.on = True
    (hold if part == "host" else broken).told.set()
    assert attempts(lambda: WAITS[wait](*found), broken) > 1
    assert broken.failed >= 2
    assert_alike(expected, found)
    for one in (expected, found):
        train(*one, 2)
    assert_alike(expected, found)


def _held(told: threading.Event, original: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(work: Any) -> None:
        assert told.wait(60)
        original(work)

    return call


def test_gradients_on_the_device_wait_there_for_an_update_that_fails_behind_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, managed, optimizers = both(tmp_path, shape=ODD, overlap="forward")
    optimizers[1].synchronize()
    broken = Broken(monkeypatch, "states to the device", spared=6)
    for number, batch in enumerate(batches(ODD, 3)):
        for module, optimizer in ((plain, optimizers[0]), (managed, optimizers[1])):
            loss = loss_of(module, batch)
            broken.on = not number and module is managed
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if not number:
            broken.told.set()
            assert attempts(optimizers[1].synchronize, broken) > 1
            assert broken.failed >= 2
            assert broken.calls == LAYERS + broken.failed, "what has arrived is not sent again"
    optimizers[1].synchronize()
    assert_same_weights(plain, managed)
    assert_same_states(*optimizers)


def test_an_update_that_fails_as_its_step_ends_is_made_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at the allocator then may have to wait for something."""
    expected, found = trained(5, tmp_path, None), trained(4, tmp_path, SLOW_HOST, overlap="forward")
    found[1].synchronize()
    broken = Broken(monkeypatch, "states to the device")

    def waits(after_step: Callable[[Any], None], runtime: Any) -> None:
        broken.told.set()
        while not broken.failed:
            time.sleep(0.001)
        broken.on = False
        with contextlib.suppress(LinkError):
            testing.of(found[0]).wait_idle()
        after_step(runtime)

    output = found[0](*token_batches(5)[4])
    broken.on = True
    output.backward()
    with testing.around("step done", waits):
        found[1].step()
    assert broken.failed
    found[1].zero_grad()
    assert_alike(expected, found)


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_what_does_not_get_home_at_all_is_told_of_and_no_step_goes_on_from_there(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed, optimizer = trained(4, tmp_path, SLOW_HOST, overlap=overlap)
    optimizer.synchronize()
    broken = Broken(monkeypatch, "states home")
    broken.told.set()
    managed(*token_batches(1)[0]).backward()
    broken.on = True
    with pytest.raises(LinkError) as told:  # noqa: PT012 - where it is waited for
        optimizer.step()
        optimizer.synchronize()
    assert "not all at home: load a checkpoint" in str(told.value.__cause__)
    if overlap == "forward":  # of each chunk that comes there, once
        for _ in testing.of(managed).chunks():
            with contextlib.suppress(LinkError):
                optimizer.synchronize()
        optimizer.synchronize()
    broken.on = False
    if overlap == "off":
        with pytest.raises(RuntimeError, match="one step further than others: load a checkpoint"):
            optimizer.step()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "part",
    [
        "bring",
        "home",
        "host",
        "gradient",
    ],
)
def test_an_error_holds_nothing_once_nobody_holds_it(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = hetmem.SimDevice(host_to_device="200MB", device_to_host="200MB")
    _, managed, optimizers = both(tmp_path, shape=ODD, device=device)
    points: dict[str, Any] = {
        "bring": "states to the device",
        "home": "states home",
        "host": "update there",
        "gradient": (hetmem.SimDevice, "gradient_out"),
    }
    broken = Broken(monkeypatch, points[part])
    broken.told.set()
    broken.on = True
    told: list[weakref.ref[BaseException]] = []
    try:
        loss_of(managed, batches(ODD, 1)[0]).backward()
        optimizers[1].step()
        optimizers[1].synchronize()
    except LinkError as error:
        told.append(weakref.ref(error))
    assert told, "nobody was told"
    broken.on = False
    with contextlib.suppress(LinkError):  # others of that time
        testing.of(managed).wait_idle()
    assert told[0]() is None
    assert torch.is_grad_enabled()
