"""One GPU, ten minutes: hasten beside gpt-fast, nanoGPT, FlashAttention-2 and cuDNN on one card (`measure.py`).

plan.py says what is measured, in which order. harness.py prepares many jobs side by side, each a process of its own
(worker.py), and measures them alone, peers in turns with ours. decode.py, serving.py, training.py, attention.py and
products.py are the jobs; gpu_tests.py and commands.py run the tests and the command line; report.py prints the tables.
"""
