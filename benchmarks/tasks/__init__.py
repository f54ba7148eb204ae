"""Tasks, metrics and dataset loaders for compressed contexts: one context, then several questions about it.

The context is compressed before any question is known, so that a task is always a context with its questions
and never a single prompt. Generated tasks are in ``ruler``, published data in ``datasets``, scores in
``metrics``, and the loop that a model is plugged into in ``run``.
"""
