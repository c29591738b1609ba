"""The tables of docs/speculation.md: what checking several rows costs, and what drawing their tokens does."""

from typing import Any

from renderers import markdown

Report = dict[str, Any]


def rows(report: Report) -> str:
    """`rows.py`: several rows beside one, the bound, and 8 rows as a share of it."""
    found = {(one["format"], one["rows"]): one for one in report["rows"]}
    counts = [count for count in (2, 4, 6, 8) if any(one["rows"] == count for one in report["rows"])]
    body = []
    for name in dict.fromkeys(one["format"] for one in report["rows"]):
        last = found[name, counts[-1]]
        cells = [name, f"{found[name, 1]['seconds'] * 1e3:.1f} ms"]
        cells += [f"{found[name, count]['of_one_row']:.2f}×" for count in counts]
        body.append([*cells, f"{last['bound_of_one_row']:.2f}×", f"{last['of_bound']:.2f}"])
        body[-1].append(f"{last['of_bound_with_attention']:.2f}")
    head = ["weights", "1 row", *(f"{count} rows" for count in counts)]
    return markdown([*head, f"bound of {counts[-1]}", "measured / bound", "with attention's operations"], body)


def draws(report: Report) -> str:
    """`draws.py`."""
    body = []
    for one in report["rows"]:
        cells = [f"{one['vocabulary']:,}", one["filter"], str(one["rows"]), f"{one['pytorch_seconds'] * 1e3:.2f} ms"]
        body.append([*cells, f"{one['seconds'] * 1e3:.2f} ms", f"{one['ratio']:.1f}×"])
    return markdown(["vocabulary", "filter", "rows", "PyTorch's operators", "native", "ratio"], body, left=2)


def speculation(report: Report) -> str:
    """`speculation.py`: speed with each proposer over that without."""
    body = []
    for one in report["rows"]:
        if one["draft"] == "none":
            continue
        text = "edits" if one["part"] == "edits" else f"texts, {'greedy' if not one['temperature'] else '0.8'}"
        cells = [text, one["weights"], one["draft"], f"{one['ratio']:.2f}×"]
        if one["draft"] == "none again":
            body.append([*cells, "", "", ""])
            continue
        body.append(
            [*cells, f"{one['predicted_ratio']:.2f}×", f"{one['acceptance']:.0%}", f"{one['tokens_per_pass']:.2f}"]
        )
    return markdown(["", "weights", "draft", "speed", "predicted", "accepted", "tokens per pass"], body, left=3)


KINDS = {"alice": "a book", "chat": "a chat", "code": "code", "german": "German"}


def kinds(report: Report) -> str:
    """`speculation.py --parts kinds`: speed with each proposer over that without, in brackets the share taken."""
    found = {(one["weights"], one["kind"], one["draft"], one["temperature"]): one for one in report["rows"]}
    drafts = [draft for draft in dict.fromkeys(key[2] for key in found) if draft != "none"]
    body = []
    for weights, kind in dict.fromkeys(key[:2] for key in found):
        cells = [KINDS[kind], weights]
        for draft in drafts:
            for temperature in (0.0, 0.8):
                one = found.get((weights, kind, draft, temperature))
                taken = f"{one['acceptance']:.0%}" if one and one["proposed_per_pass"] else "none proposed"
                cells.append("" if one is None else f"{one['ratio']:.2f}× ({taken})")
        body.append(cells)
    heads = [head for draft in drafts for head in (f"`{draft}`", "at 0.8")]
    return markdown(["text", "weights", *heads], body, left=2)


def streams(report: Report) -> str:
    """`speculation.py --parts many`: the engine with each proposer over that without, by requests at once."""
    counts = list(dict.fromkeys(one["streams"] for one in report["rows"]))
    found = {(one["weights"], one["draft"], one["streams"]): one["ratio"] for one in report["rows"]}
    kinds = [kind for kind in dict.fromkeys(key[:2] for key in found) if kind[1] != "none"]
    body = [[*kind, *(f"{found[*kind, count]:.2f}×" for count in counts)] for kind in kinds]
    return markdown(["weights", "draft", *(str(count) for count in counts)], body, left=2)


def beside_llama_cpp(report: Report) -> str:
    """`llama_cpp_drafts.py`: both programs without drafts, with n-grams and with the draft model, each at its best."""
    body = []
    for weights, program in dict.fromkeys((one["weights"], one["program"]) for one in report["rows"]):
        own = [one for one in report["rows"] if (one["weights"], one["program"]) == (weights, program)]
        cells = [weights, program]
        for kinds in (("none",), ("n-gram", "suffix"), ("draft model",)):
            best = max((one for one in own if one["draft"].startswith(kinds)), key=lambda one: one["tokens_per_second"])
            ratio = "" if best["draft"] == "none" else f" ({best['ratio']:.2f}×, {best['acceptance']:.0%})"
            cells.append(f"{best['tokens_per_second']:.0f}{ratio}")
        body.append(cells)
    return markdown(["weights", "", "no draft", "n-grams", "draft model"], body, left=2)


def trees(report: Report) -> str:
    """`trees.py`: the best chain and the best tree of candidates, by the shares and the costs."""
    body = [
        [one["weights"], *(f"{one[kind]['ratio']:.2f}× ({one[kind]['nodes']} tokens)" for kind in ("chain", "tree"))]
        for one in report["rows"]
    ]
    return markdown(["weights", "chain", "tree"], body)


def shared_noise(report: Report) -> str:
    """`shared_noise.py`: how often both have the same token."""
    kinds = ("own_noise", "same_noise", "distribution")
    body = [[f"{one['temperature']}", *(f"{one[kind]:.0%}" for kind in kinds)] for one in report["rows"]]
    return markdown(["temperature", "each its own noise", "the same noise", "min(1, p/q)"], body)


TABLES = {
    "speculation": speculation,
    "speculation-server": streams,
    "speculation-real": kinds,
    "llama-cpp-drafts": beside_llama_cpp,
    "trees": trees,
    "shared-noise": shared_noise,
    "rows": rows,
    "rows-avx2": rows,
    "draws": draws,
}
