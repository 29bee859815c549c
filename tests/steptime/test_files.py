from __future__ import annotations

import os

import pytest

from dflash.data.progress import Progress
from steptime.errors import UserError
from steptime.files import atomic_folder, atomic_text


def test_text_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "sub" / "out.txt"
    with pytest.raises(ZeroDivisionError), atomic_text(path) as file:
        file.write(str(1 // 0))
    assert not path.exists()
    with atomic_text(path) as file:
        file.write("first")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), atomic_text(path) as file:
        file.write(str(1 // 0))
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["out.txt"]


def test_folder_made_meanwhile_wins(tmp_path):
    path = tmp_path / "folder"
    with atomic_folder(path) as temporary:
        (temporary / "mine").write_text("")
        path.mkdir()
        (path / "theirs").write_text("")
    assert os.listdir(path) == ["theirs"]
    assert os.listdir(tmp_path) == ["folder"]


def test_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"), atomic_text(tmp_path / "file" / "out.txt"):
        pass


def test_progress_is_silent_at_first_and_then_says_how_long(capsys, monkeypatch):
    with Progress("Counting", 100, "things") as progress:
        progress.advance(10)
        assert capsys.readouterr().err == ""
        progress._start -= 10
        progress._next = 0
        progress.advance(10)
        assert capsys.readouterr().err == "Counting: 20 of 100 things, 10 s, about 40 s left\n"
        progress.advance(10)
        assert capsys.readouterr().err == ""  # not again so soon
    with Progress("Counting") as endless:
        endless._next = 0
        endless.advance(3)
    assert "Counting: 3 in 0 s" in capsys.readouterr().err


def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress("Counting", 10) as progress:
        progress._next = 0
        progress.advance(5)
        assert progress._bar is not None
