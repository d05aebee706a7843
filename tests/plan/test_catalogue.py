from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.plan.catalogue import Sourced, load_catalogue, parse_devices

CARDS = ["rtx-4090", "rtx-5090", "l40s", "a100-sxm", "rtx-pro-6000", "h100-sxm", "h200-sxm", "b200", "b300"]


@pytest.mark.parametrize("name", CARDS)
def test_every_card_people_asked_for_is_there(name: str) -> None:
    assert load_catalogue().gpu(name).memory_gb.value > 0


def test_every_figure_has_a_kind_a_date_and_a_source() -> None:
    catalogue = load_catalogue()
    for gpu in catalogue.gpus.values():
        for figure in (gpu.prefill_share, gpu.bf16_tflops, gpu.usd_per_hour):
            if isinstance(figure, Sourced):
                assert "202" in catalogue.cite(figure)
    assert all(gpu.prefill_share.modelled for gpu in catalogue.gpus.values())


def test_names_are_read_as_people_write_them() -> None:
    catalogue = load_catalogue()
    for text in ("RTX PRO 6000:2", "2xrtx-pro-6000", "2 x rtx_pro_6000"):
        devices = parse_devices(text, catalogue)
        assert (devices.name, devices.count) == ("rtx-pro-6000", 2)
    assert parse_devices("b200", catalogue).count == 1
    assert parse_devices("b200:8", catalogue).usd_per_hour == pytest.approx(8 * 5.98)


@pytest.mark.parametrize("text", ["gtx-970", "b200:0", "2xb200:3", ""])
def test_an_unknown_card_is_refused_and_the_known_ones_listed(text: str) -> None:
    with pytest.raises(PlanError):
        parse_devices(text, load_catalogue())
    with pytest.raises(PlanError, match=r"(?s)among rtx-4090.*did you mean h100-pcie or h100-sxm"):
        load_catalogue().gpu("h100")


@pytest.mark.parametrize(
    ("text", "value"), [("1gbe", 125e6), ("15 MB/s", 15e6), ("400GB", 50e9), (7.5, 7.5), ("125", 125)]
)
def test_a_link_is_a_name_or_a_rate(text: str | float, value: float) -> None:
    assert load_catalogue().link_bytes_s(text) == value


def test_an_unknown_link_or_disk_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match="1gbe"):
        load_catalogue().link_bytes_s("token ring")
    with pytest.raises(PlanError, match="nvme-gen4"):
        load_catalogue().disk("floppy")


def test_a_users_file_lies_over_the_packaged_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "sources: {me: {date: '2026-12-01', title: my own timing}}\n"
        "gpus:\n"
        "  b200: {usd_per_hour: {value: 3.5, kind: listed, source: me}}\n",
        encoding="utf-8",
    )
    mine = load_catalogue(path)
    assert mine.gpu("b200").usd_per_hour == Sourced(value=3.5, kind="listed", source="me")
    assert mine.gpu("b200").memory_gb == load_catalogue().gpu("b200").memory_gb


@pytest.mark.parametrize(
    "text",
    [
        "gpus: {b200: {memory: 3}}",
        "gpus: {b200: {usd_per_hour: {value: 1, kind: listed, source: nowhere}}}",
        "gpus: {new: {title: new}}",
        "- a list",
        "gpus: {b200: {usd_per_hour: {value: 1, kind: heard, source: aic}}}",
        "{",
        "gpus: []",
        "gpus: [b200]",
        "gpus:",
        "gpus: {b200: 5}",
        "sources: []",
        "gpus: {b200: {bf16_tflops: {value: 0, kind: listed, source: spec}}}",
        "gpus: {b200: {usd_per_hour: {value: .inf, kind: listed, source: spec}}}",
        "links: {1gbe: {gb_s: {value: 0, kind: listed, source: spec}}}",
    ],
)
def test_a_users_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError):
        load_catalogue(path)
    with pytest.raises(PlanError):
        load_catalogue(tmp_path / "none.yaml")
