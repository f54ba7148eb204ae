"""What a user gains and loses with the plugin, over HTTP, beside SGLang as it is.

Every benchmark starts its servers itself, with the same model and pool, and sends all of them the same
requests. All servers live at once and are asked in turn, block by block, in an order that turns around: drift
of the machine falls on all alike, and a server that is not asked sleeps.

``python -m benchmarks.serving --help`` lists the benchmarks, ``python -m benchmarks.report`` puts their
results on one page.
"""
