"""The target's side of decoding: live, with its cache; or replayed from an answer it already gave.

In: ids to run after those already held. Out: logits and tapped states for them. The live one crops its cache when
drafted tokens fall. The replayed one needs no target: greedy acceptance asks only which token the target puts after
a prefix of its own answer, and the answer itself says that.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from transformers import DynamicCache

from headrace.errors import EvaluateError
from headrace.evaluate.decode import Plain, Verified
from headrace.taps import Tap
from headrace.target.transformers_target import TransformersTarget
