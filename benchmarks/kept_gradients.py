"""Bytes over the link of a step with states sent to the device: gradients that stay there against those that go home.

    python benchmarks/kept_gradients.py [--hardware rtx4090] [--layers 12] [--steps 6]

Two models in one run, with streamed gradients; the last step counts. Bytes are exact. The time for which the link of
that machine would be busy with them is computed, not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from demo_bytes import load_demo

import hetmem
from hetmem.base.hardware import HardwareProfile
from hetmem.intercept import registry
from hetmem.optim.device_updates import UpdatePlaces
from hetmem.planner import load_profile
from hetmem.schedule.blocks import Link

LINKS = (Link.HOST_TO_DEVICE, Link.DEVICE_TO_HOST)


@contextmanager
def going_home() -> Iterator[None]:
    """All gradients go home within."""
    place_on_device = UpdatePlaces.place_on_device
    UpdatePlaces.place_on_device = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        UpdatePlaces.place_on_device = place_on_device  # type: ignore[method-assign]


def last_step(hardware: HardwareProfile, layers: int, steps: int) -> tuple[list[int], float]:
    """What crosses each link in the last step, and the part of the updates that was made with states sent."""
    demo = load_demo()
    torch.manual_seed(0)
    config = demo.GPTConfig(layers=layers)
    budget = hetmem.Budget(device="256MiB", host="1GiB", device_chunks="56MiB")
    model = hetmem.manage(
        demo.GPT(config), budget, device="sim", mixed_precision=torch.bfloat16, chunk_bytes="2MiB", hardware=hardware
    )
    optimizer = hetmem.AdamW(model.parameters(), overlap="backward", gradients="streamed")
    engine = registry.of_module(model).runtime.traffic.engine
    tokens = torch.randint(0, config.vocabulary, (1, 33))
    for _ in range(steps):
        before = [engine.links()[link].bytes for link in LINKS]
        updated = hetmem.report(model).to_dict()["updates"]
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    now = hetmem.report(model).to_dict()["updates"]
    step = {way: now[way] - updated[way] for way in now}
    crossed = [engine.links()[link].bytes - old for link, old in zip(LINKS, before, strict=True)]
    hetmem.release(model)
    return crossed, step["streamed"] / sum(step.values())


def main() -> None:
    """Train both, count, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="rtx4090")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    hardware = load_profile(options.hardware)
    with going_home():
        home, part = last_step(hardware, options.layers, options.steps)
    kept, same = last_step(hardware, options.layers, options.steps)
    assert part == same
    print(f"{part:.1%} updated on the device, sent there for it")
    for link, before, after in zip(LINKS, home, kept, strict=True):
        ratio = f"{before / 2**20:.1f} MiB where they go home, {after / 2**20:.1f} where not ({after / before:.3f})"
        print(f"{link.value}: {ratio}")
    busy = [1000 * sum(crossed) / hardware.both_ways_bytes_per_second for crossed in (home, kept)]
    print(f"the link is busy for {busy[0]:.2f} ms, or {busy[1]:.2f} ({busy[1] / busy[0]:.3f})")


if __name__ == "__main__":
    main()
