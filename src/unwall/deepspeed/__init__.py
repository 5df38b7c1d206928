"""A DeepSpeed configuration as a ``Plan``, with an account of every key."""

from unwall.deepspeed.account import TranslatedKey
from unwall.deepspeed.keys import Outcome
from unwall.deepspeed.translation import Translation, plan_of, read, translate

__all__ = ["Outcome", "TranslatedKey", "Translation", "plan_of", "read", "translate"]
