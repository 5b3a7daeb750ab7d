"""What was an option, or a value of one, and is none says what to do instead."""

import pytest
from lightning.pytorch import Trainer

from lightning_cyclic import CyclicStrategy
from lightning_cyclic.cli.main import main
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plugin.departed import DEPARTED


@pytest.mark.parametrize("text", [text for text in DEPARTED if not text.startswith("-")])
def test_what_has_left_says_what_to_do_instead(text):
    name, _, value = text.partition("=")
    with pytest.raises(ConfigurationError, match="is no option any more; ") as caught:
        CyclicStrategy(**{name: value.strip("'") or 2})
    assert str(caught.value).endswith(DEPARTED[text])


@pytest.mark.parametrize("name", ["xpipe", "weipipe_spawn"])
def test_so_does_its_name(name):
    with pytest.raises(ConfigurationError, match="is no option any more; "):
        Trainer(strategy=name, accelerator="cpu", logger=False, enable_checkpointing=False)


@pytest.mark.parametrize("flag", [text for text in DEPARTED if text.startswith("-")])
def test_so_do_flags_of_the_command_line(flag, capsys):
    assert main(["simulate", "cyclic_dp", "--workers", "2", f"{flag}=1"]) == 2
    assert f"{flag} has left; {DEPARTED[flag]}; see" in capsys.readouterr().err
