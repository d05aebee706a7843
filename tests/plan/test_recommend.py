"""The three set-ups of docs/plan.md, and the rule that chooses."""

import json
from pathlib import Path

import pytest
import yaml

from headrace.codec.spec import CodecSpec
from headrace.config import RunFile
from headrace.plan.plan import Plan, make_plan
from headrace.plan.quantity import HOUR_S
from headrace.plan.recommend import choose
from tests.plan.models import the_data_set

NVME = {"capture_gpu": "rtx-pro-6000:2", "train_gpu": "b200:8", "disk_budget": "4 TB"}
LINK = {"capture_gpu": "rtx-pro-6000:2", "train_gpu": "l40s:8", "disk_budget": 0, "link": "1gbe"}
CARD = {"capture_gpu": "rtx-4090"}


def test_4_tb_and_ten_gpus_store_a_latent_captured_on_the_training_gpus(tmp_path: Path) -> None:
    best = make_plan(the_data_set(tmp_path, **NVME)).recommendation.best
    assert best is not None
    assert (best.way, best.codec, best.placement) == ("store", "latent:5120x8", "in turns")
    assert best.times.wall_s / HOUR_S == pytest.approx(1.78 + 6 * 3.77, abs=0.02)
    assert best.usd == pytest.approx(8 * 5.98 * best.times.wall_s / HOUR_S)
    assert best.kept_bytes == pytest.approx(3.762e12, rel=0.002)


def test_a_1_gbit_link_streams_four_bits_and_waits_for_prefill(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, **LINK))
    best = plan.recommendation.best
    assert best is not None
    assert (best.way, best.codec, best.placement) == ("stream", "rotated:4", "apart")
    assert best.limited_by == "prefill"
    assert best.times.wall_s / HOUR_S == pytest.approx(6 * 24.52, abs=0.1)
    raw = next(o for o in plan.options if (o.way, o.codec, o.placement) == ("stream", "raw", "apart"))
    assert raw.limited_by == "the link"
    assert raw.times.wall_s / HOUR_S == pytest.approx(499.2, abs=0.5)
    assert plan.figures["link_tokens_s"].value == pytest.approx(2_441, abs=1)


def test_one_24_gb_card_is_told_what_would_be_possible(tmp_path: Path) -> None:
    found = make_plan(the_data_set(tmp_path, **CARD)).recommendation
    assert found.best is None
    assert any("the target does not fit" in reason for reason in found.reasons)
    assert any("training does not fit" in reason for reason in found.reasons)
    text = " ".join(found.remedies)
    assert "H100 SXM: $67.57" in text
    assert "3 layers, 64 anchors, a latent of 5120" in text
    assert "latent:5120x8 3.76 TB" in text


def test_this_version_is_told_apart_from_what_is_planned(tmp_path: Path) -> None:
    found = make_plan(the_data_set(tmp_path, **NVME)).recommendation
    assert found.now is not None
    assert found.now == found.best
    streamed = make_plan(the_data_set(tmp_path, **LINK)).recommendation
    assert streamed.now != streamed.best
    assert any("planned, not in this version" in reason for reason in streamed.reasons)
    roomy = make_plan(the_data_set(tmp_path, capture_gpu="b200:8", disk_budget="100 TB")).recommendation
    assert roomy.now is not None
    assert (roomy.now.way, roomy.now.codec) == ("store", "raw")
    assert roomy.now == roomy.best


def test_the_page_says_what_the_plans_say(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    for given in (NVME, LINK):
        best = make_plan(the_data_set(tmp_path, **given)).recommendation.best
        assert best is not None
        assert f"{best.times.wall_s / HOUR_S:.1f} h, ${best.usd:,.0f}" in page
        assert f"`{best.codec}`" in page
    for remedy in ("$67.57", "238.7 h", "21.51 GB"):
        assert any(remedy in r for r in make_plan(the_data_set(tmp_path, **CARD)).recommendation.remedies)
        assert remedy in page


def plans(folder: Path) -> list[Plan]:
    return [make_plan(the_data_set(folder, **given)) for given in (NVME, LINK, CARD, {})]


def test_the_choice_costs_at_most_a_tenth_more_than_the_cheapest(tmp_path: Path) -> None:
    for plan in plans(tmp_path):
        sizes = {c.name: c for c in plan.codecs}
        best = choose(plan.options, sizes)
        costs = [o.usd for o in plan.options if o.feasible and o.usd is not None]
        if best is not None and best.usd is not None:
            assert best.usd <= 1.1 * min(costs) + 1e-9
            assert all(o.usd is None or o.usd > 1.1 * min(costs) or sizes[o.codec].loss >= sizes[best.codec].loss
                       for o in plan.options if o.feasible)  # fmt: skip


def test_without_prices_time_decides(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, capture_gpu="b300", train_gpu="b300:8", disk_budget="4 TB"))
    best = plan.recommendation.best
    assert best is not None
    assert best.usd is None
    assert best.times.wall_s <= 1.1 * min(o.times.wall_s for o in plan.options if o.feasible)


def test_the_run_file_lines_are_a_run_file(tmp_path: Path) -> None:
    for plan in plans(tmp_path):
        run = RunFile.model_validate(yaml.safe_load(plan.recommendation.run_file))
        assert run.target.taps == [str(tap) for tap in plan.taps]
        assert (run.train.epochs, run.train.anchors, run.drafter.num_heads) == (6, 512, 32)


def test_a_budget_of_hours_or_money_is_kept(tmp_path: Path) -> None:
    found = make_plan(the_data_set(tmp_path, **NVME, max_hours=10)).recommendation
    assert found.best is None
    assert any("10 h allowed" in reason for reason in found.reasons)
    assert not found.remedies


@pytest.mark.parametrize("budget", ["1 TB", "0 TB"])
def test_the_run_file_names_the_folder_of_a_fitted_codec(tmp_path: Path, budget: str) -> None:
    folder = tmp_path / "fitted: 1"
    folder.mkdir()
    spec = CodecSpec("latent", 0, 5, 5120, "bfloat16", {"groups": [[512, 4]], "basis": "00"})
    (folder / "codec.json").write_text(json.dumps(spec.to_json()), encoding="utf-8")
    fitted = {"codec": str(folder), "codecs": [str(folder)]}
    plan = make_plan(the_data_set(tmp_path, capture_gpu="b200:8", disk_budget=budget, max_hours=100, **fitted))
    assert [c.name for c in plan.codecs] == [f"latent:512 ({folder})"]
    lines = yaml.safe_load(plan.recommendation.run_file)
    assert lines["capture"]["codec"] == str(folder)
    assert RunFile.model_validate(lines).capture.codec == str(folder)


def test_where_nothing_is_possible_the_codec_that_was_asked_for_is_named(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, codec=" FP8", **CARD))
    assert plan.recommendation.best is None
    assert yaml.safe_load(plan.recommendation.run_file)["capture"]["codec"] == "fp8"
