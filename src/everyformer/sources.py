"""The five sources that the library implements, and the letters by which docs/spec.md cites them.

T  J. Thickstun, "Transformer Networks": the Transformer in equations, and its connection to the LSTM.
M  "Transformers", a report on multi-head self-attention in the notation of Vaswani et al. 2017.
B  P. Bloem 2019, "Transformers from scratch", with the code of pbloem/former.
W  L. Weng 2020, "The Transformer Family": the members from Transformer-XL to GTrXL.
K  D. Katsaros, "Neuro-Fuzzy Computing", lecture 24, after R. Turner 2023, "An Introduction to Transformers".

Docstrings cite them as "Bloem 2019 (source B), section 2". Papers are cited by author and year. A comment such as "eq. T2, W1" marks
the line that computes equation 2 of source T and 1 of source W; docs/equations.md says how they are counted and lists the lines.
"""

SOURCES = {
    "T": "Thickstun, Transformer Networks",
    "M": "Transformers, a report on multi-head self-attention",
    "B": "Bloem 2019, Transformers from scratch",
    "W": "Weng 2020, The Transformer Family",
    "K": "Katsaros, Neuro-Fuzzy Computing, lecture 24 (after Turner 2023, An Introduction to Transformers)",
}
