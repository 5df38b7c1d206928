"""Whether a model keeps samples apart that share a sequence.

[Note: models that do not]
Position ids that start again at 0 tell a model of transformers where a sample begins, if it hands them to the function that
makes its attention mask. Some families do not (GPT-OSS, Falcon, BLOOM, OPT), and state-space and convolutional layers know of
no mask at all: a sample would silently see the ones before it. There each sample gets a sequence of its own, with padding
behind it. Which family does what is read from its source, as no version of transformers says so.
"""

import ast
import inspect
import sys
from typing import Any

_MASKS = frozenset(
    ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
)
"""What of transformers makes the mask of a causal model."""
_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
_RECURRENT = ("mamba", "rwkv", "recurrent", "gateddelta", "shortconv", "linearattention", "lightningattention")
"""Parts of the names of classes whose layers carry a state from token to token; beside SSM, which only capitals tell apart from
``SeedOssMLP``."""


def keeps_apart(config: Any) -> bool:
    """Whether samples that share a sequence stay apart in the causal language model of a config."""
    if set(getattr(config, "layer_types", None) or ()) - _ATTENTION:
        return False
    classes = _classes(config)
    if any(_is_recurrent(node) for each in classes for node in ast.walk(each)):
        return False
    functions = [node for each in classes for node in ast.walk(each) if isinstance(node, ast.FunctionDef)]
    calls = [(function, call) for function in functions for call in _mask_calls(function)]
    return bool(calls) and all(_hands_on(function, call) for function, call in calls)


def _classes(config: Any) -> list[ast.ClassDef]:
    """Of the file of a model: its own class, and all that it is made of. None where the file cannot be had."""
    import transformers

    try:
        kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return []
    known = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found, waiting = {kind.__name__}, [kind.__name__]
    while waiting:
        for node in ast.walk(known.get(waiting.pop(), ast.Module([], []))):
            # What all models of a file derive from names the layers of all of them.
            if isinstance(node, ast.Name) and node.id in known.keys() - found and not node.id.endswith("PreTrainedModel"):
                found.add(node.id)
                waiting.append(node.id)
    return [known[name] for name in sorted(found) if name in known]


def _is_recurrent(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "Conv1d":
        return True
    if not isinstance(node, ast.ClassDef):
        return False
    return "SSM" in node.name or any(word in node.name.lower() for word in _RECURRENT)


def _mask_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Also those through a variable: ``make = create_causal_mask if ... else ...``."""
    named = set(_MASKS)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp) and _names(node.value) & _MASKS:
            named |= {name for target in node.targets for name in _names(target)}
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in named]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _hands_on(function: ast.FunctionDef, call: ast.Call) -> bool:
    """Whether a call is given position ids: by name, or in a dict of the same function."""
    if any(keyword.arg == "position_ids" for keyword in call.keywords):
        return True
    if all(keyword.arg is not None for keyword in call.keywords):
        return False
    keys = (key for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys)
    return any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in keys)
