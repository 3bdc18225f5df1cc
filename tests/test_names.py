"""What users may rely on by name, and that a name says one thing: the public ones as they are, each class name once."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path

import hetmem

PUBLIC = {
    "FIFO": "rank",
    "LRU": "rank",
    "NextUse": "rank",
    "AdamW": "add_param_group beside_states check_state_dict expected_scale forget_step groups_by_parameter "
    "half_stepped load_beside_states load_state_dict needs_all_gradients number_of scale state "
    "state_dict step synchronize writes_homes zero_grad",
    "Budget": "device device_chunks home_copies host limits nvme nvme_dir",
    "MemoryReport": "data save to_dict",
    "SimDevice": "SHARE allocate allocated_bytes available_bytes captures copier copy_in cores forget_peak "
    "fragment_bytes give_back gradient_out gradients_out kept_bytes peak_bytes pin pool remarks rows_in tell_refusals "
    "told_free torch_device watched",
    "Plan": "accumulate activation_bytes activation_choices activations advice approximations as_asked at_peak best "
    "between_steps binding "
    "budget budget_bytes "
    "capacity_bytes changes checkpointing chunk_bytes chunk_waste code combined compute_bound_micro_batches "
    "compute_bound_rows constructor "
    "device_chunks device_update_share fits flops from_dict frozen generation hardware home_copies inference keywords "
    "largest_parameters "
    "layers link_bytes load logits_bytes loss micro_batches missing_bytes mixed_precision model "
    "nvme_directories optimizer other_order overlap parameters peak_bytes peak_operator prediction "
    "reasons recomputed_flops role_bytes rows save setup slot_bytes stall_seconds step_seconds "
    "terms to_dict tokens tokens_per_second with_nvme",
    "accumulate": "model batches forward loss borders generator",
    "chunked_loss": "model head kernel",
    "export_weights": "model dtype adapters",
    "latest": "directory",
    "load": "path model optimizer",
    "load_weights": "path model strict rename rounding",
    "manage": "module budget device mixed_precision chunk_bytes policy sanitize plan hardware activations frozen group",
    "managed": "budget options",
    "park": "model prepare",
    "parked": "model",
    "plan": "build_model batch budget hardware loss mixed_precision chunk_bytes micro_batches accumulate tokens "
    "checkpointing overlap "
    "max_grad_norm loss_scale real moments stochastic_rounding inference new_tokens activations frozen others",
    "plan_optimizer": "build_model budget hardware ranks machines offloaded",
    "plan_ranks": "build_model batch ranks budget hardware loss mixed_precision chunk_bytes micro_batches "
    "checkpointing overlap max_grad_norm loss_scale real machines network",
    "progress": "model",
    "release": "module",
    "report": "model",
    "save": "path model optimizer extra wait keep",
    "unpark": "model",
}
"""By name: the public attributes of a class, the parameters of a function, in the order in which they come."""


def attributes(kind: type) -> list[str]:
    own = [base for base in kind.__mro__ if base.__module__.startswith("hetmem")]
    found = {name for base in own for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    return sorted(name for name in found if not name.startswith("_"))


def test_public_names_are_those_that_users_know() -> None:
    assert set(hetmem.__all__) == PUBLIC.keys() - {"Plan"}
    for name, known in PUBLIC.items():
        public = getattr(hetmem, name, None) or hetmem.plan.__globals__[name]  # what it returns
        found = attributes(public) if inspect.isclass(public) else list(inspect.signature(public).parameters)
        assert found == known.split(), name


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (Path(__file__).parents[1] / "hetmem").rglob("*.py"):
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(path.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_sentences_name_their_subject() -> None:
    root = Path(hetmem.__file__).parents[1]
    pages = [page for page in root.glob("docs/*.md") if page.name != "log.md"]
    for path in (*root.glob("hetmem/**/*.py"), root / "README.md", root / "CONTRIBUTING.md", *pages):
        said = path.read_text().lower()
        assert not any(word in said for word in ("whoever", "somebody", "anybody", "nobody", "what is there")), path
