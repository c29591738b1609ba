"""`run.fit`: the rows of a step in as few micro-batches as fit, chosen once for the whole run."""

import json
from dataclasses import replace

import pytest

from hasten.errors import ConfigError, ResourceError
from hasten.training import memory
from hasten.training.memory import MemoryCheck
from hasten.training.session import train


def stored(result):
    values = json.loads((result.folder / "recipe.json").read_text())
    return values["data"]["batch_size"], values["data"]["accumulation"]


def test_what_was_chosen_is_kept_when_the_run_goes_on(recipe, monkeypatch):
    asked = recipe(steps=2, batch_size=2, accumulation=4, fit=True, checkpoint_every=1)
    here = MemoryCheck.here

    def with_room_for(rows):
        def patched(config, own, device, **options):
            room = here(config, own, device, **options)
            data = replace(own.data, batch_size=rows, accumulation=8 // rows)
            return replace(room, free=room.memory(data).peak)

        monkeypatch.setattr(MemoryCheck, "here", patched)

    with_room_for(4)
    first = train(asked, progress=False)
    assert stored(first) == (4, 2)
    with_room_for(8)
    assert stored(train(asked, progress=False, resume="must")) == (4, 2), "however much memory is free by now"
    with pytest.raises(ConfigError, match=r"data.batch_size: 4 -> 3"):
        train(replace(asked, data=replace(asked.data, batch_size=3)), progress=False)
    with pytest.raises(ConfigError, match=r"data.batch_size: 4 -> 2"):
        train(replace(asked, run=replace(asked.run, fit=False)), progress=False)


def test_what_fits_in_no_way_is_refused(recipe, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 1000)
    with pytest.raises(ResourceError, match=r"0.00 GB are free; lower model.layers"):
        train(recipe(fit=True), progress=False)
