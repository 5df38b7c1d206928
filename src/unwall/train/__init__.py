"""``unwall train``: fine-tunes a causal language model from a local directory, or trains one from a config.

[Note: what a run directory holds]
Everything a run writes is in ``OUT``. ``unwall report OUT`` reads these files; they are the interface between the two.

- ``run.json``: one object. ``version`` (1), ``status`` (``running``, ``interrupted``, ``failed``, ``finished``), ``command``,
  ``started`` (ISO time of the last start), ``steps`` (how many there will be), ``options`` (as given), ``answer`` (the first
  line), ``plan`` (the fields that differ from ``Plan()``), ``prediction`` (``Prediction.to_dict()``: ``step_s``, ``bound_s``,
  ``bound_by``, ``peak_bytes`` per tier, ``tokens_per_s`` ..., or null), ``machine`` (``Hardware.to_dict()``, or null),
  ``ranks``, ``passes`` (per step), ``model`` (``name``, ``params``, ``trainable``), ``data`` (``path``, ``bytes``, ``rows``
  per file), ``versions``.
- ``log.jsonl``: one JSON object per line, in the order of the steps; a resumed run goes on in the same file, and no step is in
  it twice. ``kind`` is ``step``, ``eval`` or ``start``.
  ``step``: ``step``, ``loss`` (mean over the answer tokens of the whole step), ``lr``, ``grad_norm`` (null where nothing is
  clipped), ``tokens`` (of all ranks, padding not counted), ``answer_tokens``, ``seconds``, ``tokens_per_second``,
  ``bound_fraction`` (the planner's bound over ``seconds``, or null), ``live_bytes`` and ``peak_bytes`` (per tier: ``device``,
  ``host``, ``disk``; of rank 0), ``allocated_bytes`` (the most that torch had on the accelerator so far, activations with it;
  null without one), ``stall_seconds`` (per link, of rank 0), ``epoch`` (a fraction), ``skipped_samples`` (so far).
  Where it applies: ``skipped`` (true: the step changed nothing, because loss or gradients were not finite), ``profiled`` (true:
  the step was recorded, so its time is not typical). A loss that is not finite is null.
  ``eval``: ``step``, ``loss``, ``perplexity``, ``tokens``, ``seconds``.
  ``start``, in front of the first step of each start: ``step`` (the one it goes on behind), ``seconds`` (from the command to
  the end of that first step), ``parts`` (the same by what it went to, of rank 0: see ``PARTS`` in start.py).
- ``profile.json``: the time line of one step of rank 0, as ``Profile.save_trace`` writes it (a Chrome trace: ``cat`` is the
  lane).
- ``checkpoints/``: what ``unwall.save`` wrote; with LoRA one file per checkpoint, of the adapters alone.
- ``index/``: where each sample lies in its file. Can be removed; it is made again.
- ``tensorboard/``, where it was asked for.
- After the last step: ``config.json``, ``model*.safetensors`` and the tokenizer, or ``adapter_config.json`` and
  ``adapter_model.safetensors``: ``transformers`` (or ``peft``) loads ``OUT`` itself.
"""
