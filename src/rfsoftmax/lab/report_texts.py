"""The words of the report: of each item the title, what the paper did, what was done here at the scale `small`."""

_PTB_MODEL = (
    "An LSTM of one layer with d = 200 on Penn Treebank (929,589 words and line ends to train on, n = 10,000), "
    "batches of 20 x 35 words, m = 100 negatives a word, tau = 1/0.3², Adam at 0.002 falling by a cosine, dropout "
    "0.4 of the inputs, exact validation perplexity. The paper gives neither batch, layers, optimizer nor dropout."
)
# What holds for all draws of training runs.
_DRAWS = (
    "The m negatives of a query are drawn by uniforms of which one lies in each of m equal parts of [0, 1], which "
    "lowers the noise of every sampler; the paper draws independently. Estimates below 0.2 of the kernel at a right "
    "angle are raised to that, of which the paper says nothing: a sum of random features may be negative."
)
_AS_DRAWN = "Draws and the floor under estimates are as in figure 1."
_TIMES = "Each run had one core, beside others and at another time: how long a step takes is rough."
# Title, the paper, here.
ABOUT = {
    "table1": (
        "Table 1: how well features stand for the exponential kernel",
        "Mean squared error of estimates of exp(tau h.c) for pairs of USPS digits of unit length, d = 256. The "
        "quadratic kernel alpha (h.c)² + beta has its alpha and beta fitted by least squares.",
        "The same digits: all pairs of 500 and 500 others, three drawings of each map. The error is on the scale of "
        "exp(tau (h.c - 1)), whose largest value is 1. D counts frequencies (a cosine and a sine each) for the "
        "Fourier maps, columns for Maclaurin and positive features, d² for Quadratic. Orthogonal, SORF and positive "
        "features are ours.",
    ),
    "table2": (
        "Table 2: time of the sampled loss",
        "Milliseconds to draw m = 10 negatives and compute the loss, batch 10, d = 64; the machine is not named.",
        "The same sizes, on the machine named below; the tree has leaves of 64 classes, drawn from exactly, where the "
        "paper's has one class a leaf, and its copy of the embeddings is in bytes. Nothing is trained, so the tree "
        "is never updated. EXP is the fastest of four ways to write it.",
    ),
    "figure1": (
        "Figure 1: the width of the sampling kernel",
        "Validation perplexity by epoch of RF-softmax on Penn Treebank with m = 100 and D = 1024 for several T = "
        "1/sqrt(nu).",
        f"{_PTB_MODEL} 3 epochs; how long the paper trains is not said. Three seeds for T = 0.4 and 0.5, one "
        f"elsewhere. The paper's own tree: a class a leaf. {_DRAWS} {_TIMES}",
    ),
    "figure2": (
        "Figure 2: the number of random features",
        "The same at T = 0.5 with D varied, beside the full softmax.",
        f"As figure 1: 3 epochs, one seed; the run with D = 1024 is figure 1's, with its three seeds. {_TIMES}",
    ),
    "figure3": (
        "Figure 3: all methods on Penn Treebank",
        "Validation perplexity by epoch with m = 100: the full softmax, EXP, Uniform, Quadratic with the absolute "
        "softmax, RF-softmax with D = 1024.",
        f"{_PTB_MODEL} 10 epochs; several seeds for the full softmax and our default, whose spread is the yardstick, "
        "one for the others. Quadratic's q is computed over all classes: the same distribution as by its tree of d² "
        "features, sooner had here. Unigram, MIDX and our default (an anchored tree with exact leaves) are not in the "
        f"paper. {_AS_DRAWN} {_TIMES}",
    ),
    "figure4": (
        "Figure 4: all methods with 64,000 classes",
        "Validation perplexity on Bnews with the 64,000 most frequent words, d = 512, m = 100.",
        "English Wikipedia in place of Bnews, n = 64,000 and d = 512 as there. Much smaller: one pass over 400,000 "
        "words in 2,000 steps of 10 x 20 words, judged on 10,000 words of validation text every 250 steps, one seed. "
        "So the models are far from trained and the curves show the beginning of learning. An LSTM of one layer, Adam "
        "at 0.002 falling by a cosine, dropout 0.2 of the inputs; the class embeddings by SparseAdam, by Adam for "
        f"full, so that full and EXP differ in more than sampling. Quadratic as in figure 3. {_AS_DRAWN} {_TIMES}",
    ),
    "table3": (
        "Table 3: extreme classification",
        "Precision at 1, 3 and 5 after equal iterations on three data sets of the extreme classification repository: "
        "a linear map of sparse features to d = 128, normalised.",
        "TIBKAT in place of them (90,452 records, 86,374 features, 35,116 subject headings), the same model, 5 epochs "
        "of batches of 128, m = 100 and D = 1024 (the paper gives neither), SparseAdam at 0.005 falling linearly (Adam "
        "for the class embeddings of full, so that full and EXP differ in more than sampling), all labels of a record "
        "learned at once, three seeds. Softmax loss is the mean of -log p over the labels, by the plain softmax. "
        f"{_AS_DRAWN} {_TIMES}",
    ),
    "normalization": (
        "Normalised embeddings or plain ones",
        "The full softmax with and without normalised embeddings: validation perplexity after 10 epochs on Penn "
        "Treebank, precision@1 on AmazonCat-13k.",
        "The models of figure 3 and table 3 (TIBKAT) with the full softmax; plain ones have logits h.c without tau. "
        "Three seeds, one for plain embeddings on Penn Treebank.",
    ),
    "theory": (
        "The theorems, measured",
        "Theorem 1 bounds the bias of the sampled gradient by quantities of q; Theorem 2 says how close q of random "
        "Fourier features is to the softmax; Corollary 1 joins them. The paper measures none of it.",
        "On the embeddings of the full softmax of figure 3 (and of table 3), with 60 held-out queries. The bias by the "
        "query is measured over 300 independent draws; from the relative bias the noise is taken off, in the largest "
        "coordinate it is left in; curves leave out what is below half of the noise, as all of EXP. Each coordinate "
        "has its own UB, of which the largest is shown. As printed, Theorem 1 needs gradients that are not negative, "
        "and its UB2 is too small for a poor q; docs/maths.md has the corrections.",
    ),
}
