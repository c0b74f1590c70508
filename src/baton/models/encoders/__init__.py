"""Encoders: models that read a whole text at once and give vectors or classes. They generate nothing and keep no KV.

config.py       EncoderConfig: the shape of a model, and the settings of its sentence-transformers files
families.py     config.json and tensor names of BERT, RoBERTa, DistilBERT and ModernBERT
parameters.py   our names of the tensors, and their shapes
pair_types.py   where the second text of a pair begins, as the tokenizer's post-processor marks it
torch_encoder.py  the arithmetic, over a flat batch without padding
"""
