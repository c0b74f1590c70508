"""COMPUTES: one rank. StepPlan in, StepResult out, and nothing but what the plans say.

A step's way, each stage in the file that owns it:

plan      drops, new sequences, table changes      input_batch.py: what each slot holds; sampling_columns.py: how it is sampled
batch     the tokens that run, one after another   the same, by indexing: no loop over tokens
launch    the model, bound to the pool (../kvpool/)  executors/: a socket, and what may be in it
collect   a token for each sequence that is due    ticket.py is the step meanwhile
result    rows in the plan's order                 model_runner.py, which is the walk through all of it

On a CPU an executor is a forward pass (forward/: in C, or in torch with attention/) and sampler.py, which is the definition of
sampling for all others too. On a GPU it is cuda/. Hardware is a Platform (platforms/): executor, memory, pool. Nothing above it
asks what it runs on, and all of it is numpy: only who computes with torch pays for it.
"""
