"""COMPUTES: one rank. StepPlan in, StepResult out; only plans change its state. The stages of a step, each in the file that
owns it:

plan      drops, new sequences, table changes      input_batch.py: the content of each slot; sampling_columns.py: its sampling
batch     the tokens that run, one after another   the same, by indexing: no loop over tokens
launch    the model, bound to the pool (../kvpool/)  executors/: the interface and its implementations
collect   a token for each sequence that is due    in_flight_step.py holds the launched step
result    rows in the plan's order                 model_runner.py, which runs all stages

On a CPU an executor is a forward pass (forward/: in C, or in torch with attention/) and sampler.py, which is the definition of
sampling for all others too. On a GPU it is cuda/. Hardware is a Platform (platforms/): executor, memory, pool. Nothing above it
depends on the device, and all of it is numpy: only torch executors import torch.
"""
