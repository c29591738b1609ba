"""What stands on standard error."""

from hasten.training.display import PlainLines
from hasten.training.session import train


def line(step):
    return {"step": step, "loss": 2.5, "tokens_per_second": 4100.0, "mfu": None, "spike": False}


def test_a_log_gets_a_line_at_the_first_step_every_half_minute_and_at_the_last(capsys):
    seconds = [0.0]
    plain = PlainLines("mine", clock=lambda: seconds[0])
    for step in range(11, 101):
        seconds[0] += 1.0
        plain.show(line(step), total=100, validation=None)
    told = capsys.readouterr().err.splitlines()
    assert [text.partition(" of")[0] for text in told] == [f"mine: step {n}" for n in (11, 41, 71, 100)]
    assert told[1] == "mine: step 41 of 100 · loss 2.500 · 4,100 tokens/s · 1.0 minutes left"
    assert "left" not in told[-1]


def test_a_run_shows_its_progress_on_standard_error_only_and_only_if_wanted(recipe, capsys):
    train(recipe(), progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert "tiny: step 20 of 20 · loss" in output.err
    assert "tokens/s" in output.err
    train(recipe(name="silent", steps=2), progress=False)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_is_a_bar(recipe, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    train(recipe(steps=3), progress=True)
    told = capsys.readouterr().err
    assert "\x1b[?25l" in told  # the cursor is hidden
    assert "tiny: step" not in told
