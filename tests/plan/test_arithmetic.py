"""The published arithmetic of this field, number by number."""

import pytest

from headrace.errors import PlanError
from headrace.plan import arithmetic
from headrace.plan.catalogue import Devices, load_catalogue, parse_devices
from headrace.plan.codecs import codec_size
from headrace.plan.drafter import DrafterChoice, derive_drafter
from headrace.plan.geometry import geometry_from_config
from headrace.plan.quantity import GiB
from headrace.plan.tokens import from_numbers
from tests.plan.models import QWEN_27B

TARGET = geometry_from_config(QWEN_27B, "Qwen3.6-27B")
DRAFTER = derive_drafter(TARGET, 25_600, DrafterChoice(num_heads=32, num_kv_heads=8, head_dim=128))
CATALOGUE = load_catalogue()
TOKENS = from_numbers(913_786, 800, None, 500)
HOURS = 3600


def devices(text: str) -> Devices:
    return parse_devices(text, CATALOGUE)


def test_five_taps_of_the_27b_target_are_51200_bytes_a_token_and_37_tb() -> None:
    per_token = codec_size("raw", 5, 5120).value
    assert per_token == 51_200
    total = arithmetic.total_bytes(913_786, 800, per_token).value
    assert total == pytest.approx(37.43e12, rel=1e-4)
    assert round(total / GiB) == 34_858
    assert total / 2 / GiB == pytest.approx(17_429, abs=1)
    assert total / 1.5 / GiB == pytest.approx(23_239, abs=1)


def test_457_million_answer_tokens_take_44_days_at_120_tokens_a_second() -> None:
    alone = arithmetic.decode_time(457e6, 120).value
    assert alone / HOURS == pytest.approx(1058, abs=0.5)
    assert alone / HOURS / 24 == pytest.approx(44, abs=0.1)
    assert arithmetic.decode_time(457e6, 120, 4).value == pytest.approx(alone / 4)
    assert arithmetic.decode_time(457e6, 50).value / HOURS / 24 == pytest.approx(106, abs=0.3)
    with pytest.raises(PlanError):
        arithmetic.decode_time(457e6, 0)


def test_tokens_and_drafter_alone_are_about_5_gb() -> None:
    assert arithmetic.move_bytes(1.3e9, 1.73e9).value == pytest.approx(4.76e9, rel=0.001)


def test_deepspecs_layout_is_30720_bytes_a_token_and_38_tb() -> None:
    per_token = codec_size("raw", 6, 2560).value
    assert per_token == 30_720
    assert 1.24e9 * per_token == pytest.approx(38.1e12, rel=0.001)


def test_specforge_426_reads_35_tb_for_thirty_thousand_samples() -> None:
    per_token = codec_size("raw", 4, 2880).value
    assert per_token * 65_536 == pytest.approx(1.51e9, rel=0.001)
    samples, measured_bytes = 30_000, 1.17e9
    assert samples * measured_bytes == pytest.approx(35e12, rel=0.005)


def test_15_megabytes_a_second_carry_293_tokens_and_a_trainer_asks_for_ten_times_that() -> None:
    assert arithmetic.link_tokens_s(15e6, 51_200).value == pytest.approx(293, abs=0.5)
    best = codec_size("latent:2560x4", 5, 5120).value
    assert arithmetic.link_tokens_s(15e6, best).value == pytest.approx(11_364, abs=1)
    asked = arithmetic.train_rate(DRAFTER, TOKENS, 512, devices("h100-sxm"), CATALOGUE.assumptions)
    assert asked.value == pytest.approx(2_874, rel=0.005)
    assert arithmetic.link_needed(asked.value, 51_200).value == pytest.approx(147e6, rel=0.005)
    assert arithmetic.link_needed(1000, 51_200).value == 51.2e6


@pytest.mark.parametrize(
    ("card", "dtype", "tokens_s"),
    [
        ("rtx-pro-6000", "bfloat16", 4_160),
        ("rtx-pro-6000", "fp8", 7_080),
        ("rtx-pro-6000", "nvfp4", 9_990),
        ("h100-sxm", "bfloat16", 8_120),
        ("h100-sxm", "fp8", 12_190),
        ("b200", "bfloat16", 14_340),
        ("b200", "fp8", 20_140),
        ("b200", "nvfp4", 27_160),
    ],
)
def test_prefill_is_the_modelled_table_within_a_percent(card: str, dtype: str, tokens_s: float) -> None:
    assert arithmetic.prefill_rate(TARGET, 800, dtype, devices(card), 1).value == pytest.approx(tokens_s, rel=0.01)


@pytest.mark.parametrize(
    ("card", "anchors", "tokens_s"),
    [("rtx-pro-6000", 512, 1_359), ("h100-sxm", 512, 2_874), ("b200", 512, 6_538), ("b200", 256, 12_981)],
)
def test_training_is_the_modelled_table_within_a_percent(card: str, anchors: int, tokens_s: float) -> None:
    rate = arithmetic.train_rate(DRAFTER, TOKENS, anchors, devices(card), CATALOGUE.assumptions)
    assert rate.value == pytest.approx(tokens_s, rel=0.01)
    assert rate.modelled


def test_one_pass_costs_67_dollars_on_an_h100() -> None:
    rate = arithmetic.prefill_rate(TARGET, 800, "bfloat16", devices("h100-sxm"), 1)
    hours = TOKENS.num_tokens / rate.value / HOURS
    assert hours == pytest.approx(25.0, rel=0.01)
    assert hours * 2.69 == pytest.approx(67, rel=0.01)


def test_a_target_is_split_over_the_cards_it_needs() -> None:
    assumed = CATALOGUE.assumptions
    assert arithmetic.target_fit(TARGET, "bfloat16", devices("h100-sxm"), assumed).cards == 1
    small = arithmetic.target_fit(TARGET, "bfloat16", devices("rtx-4090:2"), assumed)
    assert (small.cards, small.fits) == (3, False)
    assert "do not fit" in small.text()
    assert arithmetic.target_fit(TARGET, "nvfp4", devices("rtx-4090"), assumed).needed.value < 20e9
    five = arithmetic.prefill_rate(TARGET, 800, "bfloat16", devices("rtx-4090:5"), 3)
    assert five.value == arithmetic.prefill_rate(TARGET, 800, "bfloat16", devices("rtx-4090:3"), 3).value


def test_an_unmeasured_gain_or_machine_is_refused() -> None:
    with pytest.raises(PlanError, match="fp8"):
        arithmetic.prefill_rate(TARGET, 800, "fp8", devices("l40s"), 1)
    mystery = Devices("this machine", 1, None)
    with pytest.raises(PlanError, match="measured"):
        arithmetic.prefill_rate(TARGET, 800, "bfloat16", mystery, 1)
    with pytest.raises(PlanError, match="measured"):
        arithmetic.train_rate(DRAFTER, TOKENS, 64, mystery, CATALOGUE.assumptions)
    assert arithmetic.target_fit(TARGET, "bfloat16", mystery, CATALOGUE.assumptions).fits


def test_decoding_is_far_slower_than_prefill_and_grows_with_the_batch() -> None:
    card, assumed = devices("b200"), CATALOGUE.assumptions
    fit = arithmetic.target_fit(TARGET, "bfloat16", card, assumed)
    decode = arithmetic.decode_rate(TARGET, TOKENS, "bfloat16", card, fit, assumed)
    assert decode.value < arithmetic.prefill_rate(TARGET, 800, "bfloat16", card, 1).value
    alone = assumed.model_copy(update={"decode_batch": assumed.decode_batch.model_copy(update={"value": 1})})
    single = arithmetic.decode_rate(TARGET, TOKENS, "bfloat16", card, fit, alone)
    assert 40 < single.value < 120
    assert decode.value > 20 * single.value
    with pytest.raises(PlanError):
        arithmetic.decode_rate(TARGET, TOKENS, "bfloat16", Devices("x", 1, None), fit, assumed)


def test_anchors_are_bounded_by_the_answer_tokens() -> None:
    assert arithmetic.anchors_drawn(512, TOKENS) == 499
    assert arithmetic.anchors_drawn(64, TOKENS) == 64
    assert arithmetic.anchors_drawn(512, from_numbers(10, 800)) == 512


def test_raw_states_on_s3_cost_a_pass_every_two_days() -> None:
    month = 37.43e12 / 1e9 * 0.023
    assert month == pytest.approx(861, rel=0.001)
    found = arithmetic.break_even(67, month, month)
    assert found.rent_days == pytest.approx(2.3, abs=0.05)
    assert found.passes == pytest.approx(1 + month / 67)
    assert arithmetic.break_even(67, month / 8, month / 8).rent_days == pytest.approx(19, abs=0.4)
    assert arithmetic.break_even(67, month / 20, month / 20).rent_days == pytest.approx(47, abs=0.5)
    assert "second epoch" in arithmetic.break_even(67, 0.0, None).text()
    assert "no price" in arithmetic.break_even(None, None, None).text()


def test_read_ahead_holds_encoded_and_decoded_samples() -> None:
    assert arithmetic.trainer_ram(TOKENS, 51_200, 25_600, 64).value == 64 * 800 * 102_400
