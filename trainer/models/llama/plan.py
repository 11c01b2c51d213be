"""How tensor parallelism splits a Llama, and where its blocks are: tables, read by `trainer/parallel/`.

The layout is Megatron's (arXiv 1909.08053, section 3) with the sequence split between the layers (arXiv 2205.05198,
section 4.2.2): norms and the residual stream hold a part of the sequence, attention and feed-forward a part of the
heads and features. What a role means is said in `trainer/parallel/tensor.py`; a parameter not named here is not split.
"""

TENSOR_PARALLEL: dict[str, str] = {
    "tok_embeddings": "vocabulary",
    "layers.*.attention": "whole_sequence",
    "layers.*.attention.wq": "rows",
    "layers.*.attention.wk": "rows",
    "layers.*.attention.wv": "rows",
    "layers.*.attention.wo": "columns",
    "layers.*.feed_forward": "whole_sequence",
    "layers.*.feed_forward.w1": "rows",
    "layers.*.feed_forward.w3": "rows",
    "layers.*.feed_forward.w2": "columns",
    "output": "head",
}

BLOCKS = "layers.*"
