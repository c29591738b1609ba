"""What is measured, in which order: the most important first, so that what is left out at the end matters least."""

from dataclasses import dataclass

from gpu.harness import Group, JobSpec


@dataclass(frozen=True, slots=True)
class Phase:
    """Prepare the jobs of all groups until `prepare` (a share of the budget), measure them until `measure`.

    first: the jobs that start first, since they compile longest or need much memory for a moment. early: those of later
    phases that start behind this one's and may go on compiling, standing still while others are measured.
    """

    prepare: float
    measure: float
    groups: tuple[Group, ...]
    first: tuple[str, ...] = ()
    early: tuple[str, ...] = ()

    def names(self) -> list[str]:
        every = [name for group in self.groups for name in group.names]
        return list(dict.fromkeys([*self.first, *every, *self.early]))


def _decode(shape: str, format: str, group: int, idle: float, peak: float) -> tuple[JobSpec, JobSpec]:
    arguments = {"shape": shape, "format": format, "group": group}
    ours = JobSpec("decode:hasten", arguments, idle, peak)
    return ours, JobSpec("decode:gptfast", arguments, idle, peak, needs="gptfast-sdpa")


def _training(function: str, batch: int, peak: float, **more: object) -> JobSpec:
    needs = "nanogpt" if function == "nanogpt" else ""
    return JobSpec(f"training:{function}", {"batch": batch, **more}, 3.0, peak, needs)


JOBS: dict[str, JobSpec] = {"baseline": JobSpec("products:baseline", {}, 1.0, 4.0)}
for _name, _shape, _format, _group, _idle, _peak in (
    ("7b-bf16", "llama-7b", "bfloat16", 0, 15.0, 17.0),
    ("7b-int8", "llama-7b", "int8", 0, 8.5, 11.0),
    ("7b-int4", "llama-7b", "int4", 32, 6.0, 9.0),
    ("1b-bf16", "llama-1.1b", "bfloat16", 0, 3.5, 5.0),
    ("1b-int8", "llama-1.1b", "int8", 0, 2.5, 4.0),
    ("1b-int4", "llama-1.1b", "int4", 32, 2.5, 4.0),
):
    JOBS[f"hasten-{_name}"], JOBS[f"gptfast-{_name}"] = _decode(_shape, _format, _group, _idle, _peak)
for _format, _group, _idle in (("bfloat16", 0, 8.0), ("int8", 0, 6.0), ("int4", 32, 6.0)):
    _short = {"bfloat16": "bf16"}.get(_format, _format)
    _arguments = {"shape": "llama-1.1b", "format": _format, "group": _group}
    JOBS[f"engine-{_short}"] = JobSpec("serving:engine", _arguments, _idle, _idle + 1)
    JOBS[f"static-{_short}"] = JobSpec("serving:static", _arguments, _idle, _idle + 1)
FP8 = {"techniques": {"fp8": True}}
WIDE = {"shape": "wide"}
JOBS |= {
    "nanogpt-12": _training("nanogpt", 12, 16.0),
    "hasten-12": _training("hasten", 12, 14.0),
    "nanogpt-32": _training("nanogpt", 32, 38.0),
    "hasten-32": _training("hasten", 32, 26.0),
    "hasten-32-fp8": _training("hasten", 32, 26.0, **FP8),
    "nanogpt-wide": _training("nanogpt", 8, 24.0, **WIDE),
    "hasten-wide": _training("hasten", 8, 20.0, **WIDE),
    "hasten-wide-fp8": _training("hasten", 8, 20.0, **WIDE, **FP8),
    "losses-bf16": _training("text_losses", 12, 14.0),
    "losses-fp8": _training("text_losses", 12, 14.0, **FP8),
    "nanogpt-b3c17c6-12": _training("nanogpt", 12, 20.0, checkout="nanogpt-b3c17c6"),
    "nanogpt-77e7e04-12": _training("nanogpt", 12, 20.0, checkout="nanogpt-77e7e04"),
    "drafts": JobSpec("drafts:compare", {"shape": "llama-1.1b"}, 5.0, 7.0),
    "start": JobSpec("start:server", {"shape": "llama-1.1b"}, 1.0, 8.0),
    "start-7b": JobSpec("start:server", {"shape": "llama-7b"}, 1.0, 16.0),
    "attention": JobSpec("attention:compare", {"budget": 20}, 1.0, 6.0),
    "products": JobSpec("products:table", {"budget": 22}, 1.5, 3.0),
    "experts": JobSpec("experts:table", {"budget": 12}, 3.5, 4.5),
}
JOBS["ladder"] = JobSpec("article:ladder", {"limit": 150}, 1.0, 1.0)

SEVEN = (("prefill", ""), ("user", "hasten"), ("profile", ""))
START = (("measure cold", ""), ("measure warm", ""))
ENGINE = (("measure 256", ""), ("measure 64", ""), ("measure 1", ""))
PHASES: tuple[Phase, ...] = (
    Phase(
        0.33,
        0.50,
        (
            Group(("baseline",)),
            Group(("hasten-7b-bf16", "gptfast-7b-bf16"), 2, SEVEN),
            Group(("hasten-7b-int4", "gptfast-7b-int4"), 2, SEVEN),
            Group(("hasten-7b-int8", "gptfast-7b-int8"), 2, SEVEN),
            Group(("hasten-12", "nanogpt-12"), 2, (("losses", ""), ("profile", ""))),
        ),
        ("gptfast-7b-int8", "gptfast-7b-bf16", "gptfast-7b-int4", "nanogpt-12", "hasten-12"),
        ("gptfast-1b-bf16", "gptfast-1b-int4", "nanogpt-32", "nanogpt-wide", "drafts", "start-7b"),
    ),
    Phase(
        0.64,
        0.93,
        (
            Group(("engine-bf16", "static-bf16"), 0, (*ENGINE, ("profile 64", "engine"))),
            Group(("hasten-1b-bf16", "gptfast-1b-bf16"), 2, (("prefill", ""), ("profile", "hasten"))),
            Group(("hasten-1b-int4", "gptfast-1b-int4"), 2, (("prefill", ""),)),
            Group(("hasten-32", "nanogpt-32", "hasten-32-fp8"), 2, (("losses", ""),)),
            Group(("attention",)),
            Group(("engine-int8", "static-int8"), 0, ENGINE),
            Group(("engine-int4", "static-int4"), 0, ENGINE),
            Group(("products",)),
            Group(("experts",)),
            Group(("hasten-wide", "hasten-wide-fp8", "nanogpt-wide"), 2, (("losses", ""),)),
            Group(("losses-bf16", "losses-fp8"), 0, (("losses500", ""),)),
            Group(("hasten-1b-int8",), 1),
            Group(("drafts",), 1),
            Group(("start-7b",), 0, START, limit=75),
            Group(("start",), 0, START),
        ),
        ("nanogpt-32", "nanogpt-wide", "engine-bf16", "hasten-32", "hasten-32-fp8"),
        ("ladder",),
    ),
    Phase(0.94, 0.99, (Group(("ladder",), limit=155),)),
)
