"""COMPUTES: one rank. StepPlan in, StepResult out, and nothing but what the plans say.

A step's way, each stage in the file that owns it:

plan      drops, new sequences, table changes      input_batch.py keeps what each slot holds
batch     the tokens that run, one after another   the same, by indexing: no loop over tokens
forward   the model, bound to the pool (../kvpool/)  forward/: a socket, and what may be in it; attention/ is torch's
sample    a token for each sequence that is due    sampler.py, on the rows that need logits and no others
result    rows in the plan's order                 model_runner.py, which is the walk through all of it

Hardware is a Platform (platforms/): forward pass, memory, pool. Nothing above it asks what it runs on, and all of it is numpy:
only forward/torch_forward.py and attention/ know of torch, and only who uses them pays for it.
"""
