"""Codecs side by side as a picture: every codec is named, lossless ones too."""

from pathlib import Path

from headrace.report.codecs import draw_codecs

ROWS = [
    {"codec": "lossless", "bytes_per_token": 3972.4, "lost": 0.0, "lost_by_tap": [0.0, 0.0]},
    {"codec": "runs/codec", "bytes_per_token": 156.0, "lost": 0.06, "lost_by_tap": [0.1, 0.02]},
]


def test_every_codec_is_drawn_and_named(tmp_path: Path) -> None:
    draw_codecs(ROWS, tmp_path / "codecs.svg")
    text = (tmp_path / "codecs.svg").read_text()
    assert text.startswith("<svg")
    assert "lossless" in text
    assert ">codec<" in text or "codec" in text
    draw_codecs([], tmp_path / "none.svg")
    assert (tmp_path / "none.svg").read_text().startswith("<svg")
