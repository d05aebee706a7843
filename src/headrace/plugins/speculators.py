"""A hidden-states backend for speculators: its trainer reads a headrace store instead of one file a sample.

In: their training flags and `--headrace-states`; sample i of their data set. Out: its states [T, taps + 1, H], the last
slot the state before the final norm, and its ids, as their file backend gives them; None for a sample without a record,
which their `--on-missing` decides on. Importing this registers the backend and must come before their train module.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from headrace.codec.base import Codec, record_states
from headrace.codec.registry import open_codec
from headrace.errors import ConfigError
from headrace.interchange.arrow_folder import ArrowFolder
from headrace.record import sample_id
from headrace.store.manifest import Manifest
from headrace.store.reader import StoreReader
from headrace.taps import FINAL_PRE_NORM, parse_tap, to_speculators
from headrace.token_rule import ALL_TOKENS

BACKEND = "headrace"
_LAST_SLOT = "speculators 0.9.0 takes the last slot of every sample as the state before the final norm, in every mode"


def store_layer_ids(states: Path) -> list[int]:
    """What speculators' `--target-layer-ids` must be for a store.

    Raises: ConfigError when the last tap is not final:pre_norm; StoreError for a folder that is no store.
    """
    manifest = Manifest.read(states)
    taps = [parse_tap(name) for name in manifest.taps]
    if taps[-1] != FINAL_PRE_NORM:
        hint = f"{_LAST_SLOT}: capture with capture.final_state: true"
        raise ConfigError(f"final:pre_norm as the last tap of {states}", ", ".join(manifest.taps), hint)
    if manifest.token_rule != str(ALL_TOKENS):
        found = f"the token rule {manifest.token_rule}"
        raise ConfigError("states of every token, which speculators reads", found, "capture with capture.tokens: all")
    num_blocks = int(manifest.target["num_blocks"])
    return [to_speculators(tap, num_blocks) for tap in taps[:-1]]


class HeadraceTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Samples of a data set from a store, found by row and checked by content; opened anew in every loader process."""

    def __init__(self, states: Path, data: Path) -> None:
        """Args: data: the saved data set, which says of each number its ids, mask and row."""
        self._states, self._data = states, data
        self._opened: tuple[ArrowFolder, StoreReader, Codec] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def setup(self) -> None:
        """Open the store and the data set, once a process. Raises: StoreError, ConfigError."""
        if self._opened is None:
            reader = StoreReader(self._states)
            self._opened = ArrowFolder(self._data), reader, open_codec(reader.manifest.codec, self._states)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """States and ids of a sample; None where the store has no record.

        Raises: StoreError for a damaged record, and for one of other ids or mask than the data set's sample.
        """
        self.setup()
        assert self._opened is not None
        data, reader, codec = self._opened
        row = data.row(file_idx)
        if row not in reader:
            return None
        ids, mask = data.sample(file_idx)
        record = reader.read(row, sample_id(ids, mask))
        return {"hidden_states": record_states(record, codec), "token_ids": torch.from_numpy(ids.astype(np.int64))}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Refused: a store is filled by `headrace capture`."""
        raise _no_generation()


@HiddenStatesBackend.register(BACKEND)
class HeadraceBackend(HiddenStatesBackend):  # type: ignore[misc]
    """`--hidden-states-backend headrace --headrace-states FOLDER`."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add `--headrace-states`."""
        parser.add_argument("--headrace-states", type=str, default=None, help="states folder of a headrace run")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Nothing: states are captured by headrace, not by their launcher."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> HeadraceTransfer:
        """A transfer for their flags.

        Raises: ConfigError for no store, one without final:pre_norm, other layers than its taps, or `--on-missing
        generate`; StoreError for a folder that is no store.
        """
        if not args.headrace_states:
            raise ConfigError("--headrace-states with the states folder of a run", "none", "name it")
        states = Path(args.headrace_states)
        expected = store_layer_ids(states)
        if args.target_layer_ids is None or list(args.target_layer_ids) != expected:
            hint = f"the store's taps are these in speculators' numbers; say --target-layer-ids {_words(expected)}"
            raise ConfigError(f"target_layer_ids {expected}", str(args.target_layer_ids), hint)
        if args.on_missing == "generate":
            raise _no_generation()
        transfer = HeadraceTransfer(states, Path(data_path))
        transfer.setup()
        return transfer

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Refused: no vLLM connector writes into a store yet."""
        raise _no_generation()


def _words(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _no_generation() -> ConfigError:
    hint = "say --on-missing raise (or skip), and capture what is missing with headrace capture"
    return ConfigError("a store that holds every sample", "a request to generate states with vLLM", hint)
