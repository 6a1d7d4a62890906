"""Where a conversion may write, what others find there meanwhile, and what is left afterwards."""

import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from megagrpo.weights.folders import copy_side_files, staged


def fill(out: Path, *sources: Path) -> None:
    with staged(out, *sources) as folder:
        (folder / "file").write_text("whole")


def test_of_two_that_write_one_folder_the_second_is_refused_and_the_first_stays_whole(
    tmp_path: Path,
) -> None:
    """Both would write into the same place, and what is renamed last would be a mixture."""
    out = tmp_path / "out"
    with staged(out) as folder:
        (folder / "file").write_text("whole")
        with pytest.raises(ValueError, match=r"another process writes .*\.out\.partial; wait"):
            fill(out)
        assert [path.name for path in folder.iterdir()] == ["file"]
    assert (out / "file").read_text() == "whole"
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_killed_process_left_is_cleared_and_its_lock_gone(tmp_path: Path) -> None:
    """CONV-42: SIGKILL in the middle; nothing under the final name, and the next run works."""
    out, context = tmp_path / "out", get_context("fork")
    here, there = context.Pipe()

    def stop_in_the_middle() -> None:
        with staged(out) as folder:
            (folder / "half").mkdir()
            (folder / "half" / "file").write_text("half")
            there.send("in the middle")
            signal.pause()

    process = context.Process(target=stop_in_the_middle)
    process.start()
    assert here.recv() == "in the middle"
    with pytest.raises(ValueError, match="another process writes"):
        fill(out)
    process.kill()
    process.join()
    assert not out.exists() and (tmp_path / ".out.partial" / "half" / "file").exists()
    fill(out)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(out) == ["file"]


def test_a_link_as_destination_is_followed_to_an_empty_or_a_new_folder(tmp_path: Path) -> None:
    """Found out before the conversion, not by the last rename."""
    (tmp_path / "disk").mkdir()
    for name, exists in (("empty", True), ("new", False)):
        target, link = tmp_path / "disk" / name, tmp_path / f"to-{name}"
        if exists:
            target.mkdir()
        link.symlink_to(target)
        fill(link)
        assert link.is_symlink() and (target / "file").read_text() == "whole"
    assert sorted(os.listdir(tmp_path / "disk")) == ["empty", "new"]


def test_a_folder_that_cannot_be_replaced_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder and a mounted disk are empty folders too, but no rename ends there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is the current folder, which cannot be replaced"):
        fill(Path("."))
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(ValueError, match="disk is a mount point, which cannot be replaced"):
        fill(tmp_path / "disk")
    assert os.listdir(tmp_path) == ["disk"]


def test_a_failure_leaves_no_trace_and_an_empty_destination_stays(tmp_path: Path) -> None:
    """Also one that is no error of ours: Ctrl-C."""
    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["out"] and not os.listdir(tmp_path / "out")


def test_side_files_are_all_but_weights_hidden_ones_and_unknown_folders(tmp_path: Path) -> None:
    """CONV-35: further chat templates lie in a folder of their own."""
    hf, out = tmp_path / "hf", tmp_path / "out"
    texts = ("config.json", "chat_template.jinja", "merges.txt", "modeling_x.py", "README.md")
    templates = ("additional_chat_templates/tools.jinja", "additional_chat_templates/rag.jinja")
    left = ("pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "x.gguf")
    for name in (
        *texts,
        *templates,
        *left,
        ".git/config",
        ".gitattributes",
        "original/params.json",
    ):
        (hf / name).parent.mkdir(parents=True, exist_ok=True)
        (hf / name).write_text("{}")
    copy_side_files(hf, out)
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {*texts, *templates}
