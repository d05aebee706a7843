from pathlib import Path

from headrace.testing.tiny_target import VOCAB_SIZE, save_tiny_target, tiny_model, tiny_tokenizer


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = save_tiny_target(tmp_path / "a") / "model.safetensors"
    again = save_tiny_target(tmp_path / "b") / "model.safetensors"
    other = save_tiny_target(tmp_path / "c", seed=1) / "model.safetensors"
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_the_tokenizer_has_the_models_vocabulary() -> None:
    assert len(tiny_tokenizer()) == VOCAB_SIZE == tiny_model().config.vocab_size
