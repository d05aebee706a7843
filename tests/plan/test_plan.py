import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import PlanError
from headrace.plan.inputs import Measurement, make_inputs
from headrace.plan.plan import make_plan
from tests.plan.models import LLAMA, the_data_set


def test_the_data_set_is_planned_as_published(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path))
    assert plan.figures["bytes_per_token"].value == 51_200
    assert plan.figures["bytes_per_sample"].value == 40.96e6
    assert plan.figures["total_bytes"].value == 913_786 * 800 * 51_200
    assert plan.figures["stored_bytes"].value == pytest.approx(plan.figures["total_bytes"].value, rel=0.001)
    assert plan.figures["drafter_params"].value == pytest.approx(1.73e9, rel=0.001)
    assert plan.figures["capture_s"].value / 3600 == pytest.approx(25.0, rel=0.01)


def test_the_last_state_weighs_61440_bytes_a_token(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, taps=["1", "16", "31", "46", "61", "final:pre_norm"]))
    assert plan.figures["bytes_per_token"].value == 61_440


def test_prefill_and_decode_are_two_figures(tmp_path: Path) -> None:
    naive = make_plan(the_data_set(tmp_path, decode_tokens_s=120, num_streams=4, mean_answer=457e6 / 913_786))
    assert naive.figures["decode_s"].value / 3600 == pytest.approx(1058 / 4, rel=0.001)
    modelled = make_plan(the_data_set(tmp_path))
    assert modelled.figures["decode_s"].modelled
    assert modelled.figures["capture_s"].value < modelled.figures["decode_s"].value < naive.figures["decode_s"].value
    assert "decode_s" not in make_plan(the_data_set(tmp_path, mean_answer=None)).figures


def test_every_codec_has_every_way_at_every_placement(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, codecs=["fp8"], codec="raw"))
    assert [c.name for c in plan.codecs] == ["fp8", "raw"]
    assert len(plan.options) == 2 * 2 * 3
    alone = make_plan(the_data_set(tmp_path, capture_gpu="b200:8"))
    assert {o.placement for o in alone.options} == {"in turns"}


def test_a_narrow_codec_makes_a_small_fc(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, codec="latent:5120x4"))
    assert plan.drafter.fc_params == 5120 * 5120
    assert plan.figures["bytes_per_token"].value == 2_640


def test_auto_is_the_gentlest_codec_whose_store_fits(tmp_path: Path) -> None:
    sizes = {
        c: make_plan(the_data_set(tmp_path, codec=c)).figures["stored_bytes"].value for c in ("raw", "latent:640x4")
    }
    for room, name in ((sizes["raw"] * 1.02, "raw"), (sizes["raw"] * 0.52, "fp8"), (1e12, "latent:2560x4")):
        plan = make_plan(the_data_set(tmp_path, codec="auto", store_bytes=int(room)))
        assert plan.codec.setting == name
        assert plan.figures["stored_bytes"].value * 1.01 <= room
        assert f"codec auto is {name}" in plan.notes
    assert make_plan(the_data_set(tmp_path, codec="auto", disk_budget="1 TB")).codec.setting == "latent:2560x4"
    with pytest.raises(PlanError, match=r"by latent:640x4"):
        make_plan(the_data_set(tmp_path, codec="auto", store_bytes=int(sizes["latent:640x4"])))
    with pytest.raises(PlanError, match=r"store\.max_bytes"):
        make_plan(the_data_set(tmp_path, codec="auto"))


def test_measured_rates_replace_modelled_ones() -> None:
    measured = Measurement(
        machine="here", date="2026-11-30", capture_tokens_s=100, train_tokens_s=50, decode_tokens_s=20,
        capture_fixed_s=3, train_fixed_s=7,
    )  # fmt: skip
    given = {
        "model": "demo",
        "num_samples": 10,
        "mean_tokens": 100,
        "mean_answer": 40,
        "epochs": 2,
        "heldout_share": 0.1,
    }
    plan = make_plan(make_inputs(**given, measured=measured))
    assert plan.figures["capture_s"].value == 1000 / 100 + 3
    assert plan.figures["train_s"].value == 2 * 900 / 50 + 7
    assert plan.figures["decode_s"].value == 400 / 20
    assert not any(plan.figures[name].modelled for name in ("capture_s", "train_s", "decode_s"))
    assert plan.recommendation.best is not None
    assert plan.recommendation.best.usd is None


def test_rented_storage_is_paid_by_the_month(tmp_path: Path) -> None:
    plan = make_plan(the_data_set(tmp_path, disk="s3", months=2))
    store = next(o for o in plan.of_codec("raw") if o.way == "store" and o.placement == "apart")
    bought = make_plan(the_data_set(tmp_path, disk="s3", months=1))
    half = next(o for o in bought.of_codec("raw") if o.way == "store" and o.placement == "apart")
    assert store.usd is not None
    assert half.usd is not None
    assert store.usd - half.usd == pytest.approx(861, rel=0.001)
    assert plan.break_even.rent_days == pytest.approx(2.3, abs=0.1)


def test_an_unknown_disk_or_codec_is_refused(tmp_path: Path) -> None:
    for given in (
        {"disk": "floppy"},
        {"codec": "zip"},
        {"codecs": ["zip"]},
        {"link": "token ring"},
        {"disk_budget": "big"},
    ):
        with pytest.raises(PlanError):
            make_plan(the_data_set(tmp_path, **given))


def test_a_plan_needs_no_torch_and_no_arrow(tmp_path: Path) -> None:
    inputs = the_data_set(tmp_path)
    code = (
        "import sys\n"
        "from headrace.plan.inputs import make_inputs\n"
        "from headrace.plan.plan import make_plan\n"
        "from headrace.plan.report import render, to_json\n"
        f"plan = make_plan(make_inputs(model={inputs.model!r}, num_samples=10, mean_tokens=800.0))\n"
        "to_json(plan), render(plan)\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'matplotlib', 'huggingface_hub', 'tokenizers'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_narrow_codec_may_fit_where_raw_features_do_not(tmp_path: Path) -> None:
    plan = make_plan(
        the_data_set(tmp_path, train_gpu="l40s:8", capture_gpu="rtx-pro-6000:2", num_layers=6, anchors=300)
    )
    fits = {o.codec: o.feasible for o in plan.options if (o.way, o.placement) == ("store", "apart")}
    assert not fits["raw"]
    assert fits["latent:5120x4"]


def test_a_target_that_cannot_be_computed_with_is_a_plan_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 0}), encoding="utf-8")
    with pytest.raises(PlanError, match=r"config\.json"):
        make_plan(make_inputs(model=str(tmp_path), num_samples=10, mean_tokens=100))
