"""Picture files: the ending says which; a page is complete in itself."""

import re

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.viz import save_picture

PLAN = make_plan("1f1b", num_stages=2, num_workers=2, num_steps=2)
BEGINS = {
    "svg": b"<?xml",
    "png": b"\x89PNG\r\n",
    "html": b"<!DOCTYPE html>",
    "SVG": b"<?xml",
    "json": b"[\n{",
}


@pytest.mark.parametrize("ending", BEGINS)
def test_endings(tmp_path, ending):
    first, second = tmp_path / f"one.{ending}", tmp_path / f"two.{ending}"
    save_picture(PLAN, first)
    save_picture(PLAN, str(second))
    assert first.read_bytes().startswith(BEGINS[ending])
    assert first.read_bytes() == second.read_bytes()


def test_a_page_holds_the_picture_and_asks_for_nothing_else(tmp_path):
    save_picture(PLAN, tmp_path / "page.html")
    save_picture(PLAN, tmp_path / "picture.svg")
    page, svg = (tmp_path / name for name in ("page.html", "picture.svg"))
    text, drawn = page.read_text(), svg.read_text()
    assert drawn[drawn.index("<svg") :] in text
    assert "<title>1f1b: 2 workers, 2 stages, 2 micro-batches per step</title>" in text
    assert "<title>forward, stage 1, micro-batch 0, of step 1, on version 1" in text
    assert not re.findall(r"<script|<link|<img|src=|@import|url\((?!#)", text)
    assert set(re.findall(r'href="(.)', text)) <= {"#"}


def test_the_first_slot(tmp_path):
    save_picture(PLAN, tmp_path / "late.svg", first_slot=6)
    text = (tmp_path / "late.svg").read_text()
    assert "micro-batch 0, of step 1" in text
    assert "micro-batch 0, of step 0" not in text


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.svg.gz"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(PlanError, match=r"\.html, \.json; write it like picture"):
        save_picture(PLAN, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"x\.svg cannot be written \(No such file"):
        save_picture(PLAN, tmp_path / "nowhere" / "x.svg")
