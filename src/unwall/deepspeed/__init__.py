"""A DeepSpeed configuration as a ``Plan``, with an account of every key."""

from unwall.deepspeed.account import Entry
from unwall.deepspeed.keys import Kind
from unwall.deepspeed.translation import Translation, plan_of, read, translate

__all__ = ["Entry", "Kind", "Translation", "plan_of", "read", "translate"]
