import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import TargetConfig
from headrace.errors import PrepareError, TargetError
from headrace.taps import EMBEDDING, FINAL_POST_NORM, FINAL_PRE_NORM, Tap, to_transformers
from headrace.target.transformers_target import TransformersTarget, load_target, target_folder
from headrace.testing.tiny_target import tiny_model
from tests.target.conftest import LoadTiny

BLOCKS = [Tap("after_block", n) for n in range(4)]
IDS = [np.random.default_rng(n).integers(3, 64, size).astype(np.int32) for n, size in enumerate((9, 4, 1))]


def reference(target: TransformersTarget, ids: np.ndarray) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        out = target.model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
    return tuple(states[0] for states in out.hidden_states)


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen3", "qwen3-sharded"])
def test_taps_equal_output_hidden_states_and_no_neighbour(load_tiny: LoadTiny, name: str) -> None:
    target = load_tiny(name)
    taps = [EMBEDDING, *BLOCKS, FINAL_POST_NORM]
    for ids, states_TLH in zip(IDS, target.states(IDS, taps, 9), strict=True):
        expected = reference(target, ids)
        assert states_TLH.shape == (len(ids), len(taps), 32)
        for n, tap in enumerate(taps):
            index = to_transformers(tap, 5)
            torch.testing.assert_close(states_TLH[:, n], expected[index], rtol=1e-4, atol=1e-4)
            for neighbour in {max(index - 1, 0), min(index + 1, 5)} - {index}:
                assert (states_TLH[:, n] - expected[neighbour]).norm() > 0.05 * expected[neighbour].norm()


def test_norm_of_the_state_before_the_final_norm_is_the_state_after_it(load_tiny: LoadTiny) -> None:
    target = load_tiny("qwen3")
    (states_TLH, *_) = target.states(IDS, [FINAL_PRE_NORM, FINAL_POST_NORM], 9)
    assert not torch.equal(states_TLH[:, 0], states_TLH[:, 1])
    torch.testing.assert_close(target.model.model.norm(states_TLH[:, 0]), states_TLH[:, 1])


def test_taps_come_in_the_order_asked(load_tiny: LoadTiny) -> None:
    target = load_tiny()
    down = target.states(IDS, BLOCKS[::-1], 9)
    up = target.states(IDS, BLOCKS, 9)
    assert all(torch.equal(a, b.flip(1)) for a, b in zip(down, up, strict=True))


@pytest.mark.parametrize(("taps", "num_run"), [([EMBEDDING], 0), (BLOCKS[:2], 2), (BLOCKS, 4), ([FINAL_PRE_NORM], 5)])
def test_the_pass_stops_after_the_last_tap(load_tiny: LoadTiny, taps: list[Tap], num_run: int) -> None:
    target = load_tiny()
    calls: list[int] = []
    for n, block in enumerate(target.model.model.layers):
        block.mlp.register_forward_hook(lambda *_, n=n: calls.append(n))
    target.model.model.norm.register_forward_hook(lambda *_: calls.append(-1))
    target.states(IDS, taps, 9)
    assert calls == list(range(num_run))


def test_no_hook_stays_behind(load_tiny: LoadTiny) -> None:
    target = load_tiny()
    target.states(IDS, [EMBEDDING, *BLOCKS, FINAL_PRE_NORM, FINAL_POST_NORM], 9)
    for module in (*target.model.model.layers, target.model.model.norm):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_group_gives_the_same_bits_again_also_after_answers_were_written(load_tiny: LoadTiny) -> None:
    target = load_tiny("qwen3", "bfloat16")
    first = target.states(IDS, BLOCKS, 9)
    target.generate([[3, 4, 5], [6]], 8, 0.0, 1.0, 0)
    again = load_tiny("qwen3", "bfloat16").states(IDS, BLOCKS, 9)
    third = target.states(IDS, BLOCKS, 9)
    assert first[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, third, strict=True))


def test_other_members_or_padding_change_states_within_tolerance_only(load_tiny: LoadTiny) -> None:
    target = load_tiny()
    together = target.states(IDS, BLOCKS, 16)
    for ids, states in zip(IDS, together, strict=True):
        torch.testing.assert_close(target.states([ids], BLOCKS, len(ids))[0], states, rtol=1e-4, atol=1e-4)


def test_cached_decoding_collects_the_states_of_each_pass(load_tiny: LoadTiny) -> None:
    target = load_tiny()
    ids = torch.from_numpy(IDS[0].astype(np.int64))[None]
    taps = [BLOCKS[1], FINAL_PRE_NORM]
    with target.tap_states(taps) as seen, torch.no_grad():
        first = target.model(ids[:, :6], use_cache=True)
        states = [seen.take()]
        target.model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        states.append(seen.take())
        with pytest.raises(TargetError, match="reaches every tap"):
            seen.take()
    assert [list(s.shape) for s in states] == [[1, 6, 2, 32], [1, 3, 2, 32]]
    whole = target.states([IDS[0]], taps, 9)[0]
    torch.testing.assert_close(torch.cat(states, 1)[0], whole, rtol=1e-4, atol=1e-4)


def test_a_tap_beyond_the_depth_is_refused(load_tiny: LoadTiny) -> None:
    with pytest.raises(TargetError, match="from 0 to 4"):
        load_tiny().states(IDS, [Tap("after_block", 5)], 9)


def test_a_sample_longer_than_its_group_is_refused(load_tiny: LoadTiny) -> None:
    with pytest.raises(TargetError, match="1 to 8 tokens"):
        load_tiny().states(IDS, BLOCKS, 8)


def test_the_spec_tells_targets_apart(load_tiny: LoadTiny) -> None:
    llama, untied, half = (load_tiny(*a).spec for a in (("llama",), ("llama-untied",), ("llama", "bfloat16")))
    assert llama.architecture == "LlamaForCausalLM"
    assert (llama.hidden_size, llama.vocab_size, llama.quantisation) == (32, 64, "none")
    assert llama.weights_hash != untied.weights_hash
    assert llama.weights_hash == half.weights_hash
    assert (llama.dtype, half.dtype) == ("float32", "bfloat16")


def broken(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def test_a_folder_without_weights_is_a_clear_error(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(folders["llama"], tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"weights as \*\.safetensors in .*broken, found .*config\.json"):
        load_target(TargetConfig(model=str(folder)))


def test_a_missing_shard_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(folders["qwen3-sharded"], tmp_path)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(TargetError, match=gone.name):
        load_target(TargetConfig(model=str(folder)))


def test_a_missing_tensor_is_refused_not_made_up(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(folders["llama"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        load_target(TargetConfig(model=str(folder), dtype="float32"))


def test_an_unknown_architecture_is_a_clear_error(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(folders["llama"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "watermill"}))
    with pytest.raises(TargetError, match=r"a config in .*config\.json that transformers knows"):
        load_target(TargetConfig(model=str(folder)))


def test_blocks_at_another_place_are_refused(monkeypatch: pytest.MonkeyPatch, load_tiny: LoadTiny) -> None:
    model = tiny_model()
    del model.model.norm
    found: dict[str, list[str]] = {"missing_keys": [], "mismatched_keys": []}
    monkeypatch.setattr(
        "headrace.target.transformers_target.AutoModelForCausalLM.from_pretrained", lambda *_, **__: (model, found)
    )
    with pytest.raises(TargetError, match=r"model\.layers"):
        load_tiny()


def test_a_folder_without_tokenizer_is_a_clear_error(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(folders["llama"], tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(TargetError, match="a tokenizer in"):
        load_target(TargetConfig(model=str(folder)))


def test_no_such_folder_and_no_such_device_are_clear_errors(folders: dict[str, Path]) -> None:
    with pytest.raises(TargetError, match="a model folder"):
        target_folder("/no/such/model")
    with pytest.raises(TargetError, match="a model folder, found a file"):
        target_folder(str(folders["llama"] / "config.json"))
    with pytest.raises(TargetError, match="a model folder"):
        target_folder("~nobody-of-this-name/model")
    odd = TargetConfig(model=str(folders["llama"])).model_copy(update={"device": "water"})
    with pytest.raises(TargetError, match="auto, cpu, cuda"):
        load_target(odd)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"], ids=repr)
def test_a_broken_file_is_named(folders: dict[str, Path], tmp_path: Path, name: str, content: bytes) -> None:
    folder = broken(folders["llama"], tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(TargetError, match=rf"broken/{name}"):
        load_target(TargetConfig(model=str(folder)))


@pytest.mark.parametrize("name", ["llama", "qwen3-sharded"])
def test_weights_that_are_cut_off_are_named(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = broken(folders[name], tmp_path)
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TargetError, match=path.name):
        load_target(TargetConfig(model=str(folder)))


@pytest.mark.parametrize("values", [{"hidden_size": "a"}, {"num_attention_heads": 0}, {"hidden_act": "odd"},
                                    {"quantization_config": {"quant_method": "awq"}}, {"hidden_size": 64},
                                    {"model_type": None}])  # fmt: skip
def test_a_config_that_does_not_fit_is_named(
    folders: dict[str, Path], tmp_path: Path, values: dict[str, object]
) -> None:
    folder = broken(folders["llama"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(TargetError, match=r"broken/config\.json"):
        load_target(TargetConfig(model=str(folder), dtype="float32"))


def test_a_tensor_of_another_shape_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = broken(folders["llama"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(TargetError, match=r"1 missing or of another shape: .*model\.embed_tokens\.weight"):
        load_target(TargetConfig(model=str(folder), dtype="float32"))


def test_a_folder_that_is_no_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=rf"no {tmp_path}/config\.json"):
        target_folder(str(tmp_path))


@pytest.mark.parametrize("content", [None, b"\xff", b""])
def test_a_template_that_cannot_be_read_is_named(
    folders: dict[str, Path], tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "odd.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PrepareError, match=r"odd\.jinja"):
        load_target(TargetConfig(model=str(folders["llama"]), chat_template=str(path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_a_clear_error(folders: dict[str, Path]) -> None:
    with pytest.raises(TargetError, match="a GPU"):
        load_target(TargetConfig(model=str(folders["llama"]), device="cuda"))
