"""The numbers that the paper prints. Its figures are curves without numbers."""

# Mean squared errors by method and D.
TABLE1 = {
    ("Quadratic", 65536): 2.8e-3,
    ("Random Fourier", 100): 2.6e-3,
    ("Random Fourier", 1000): 2.7e-4,
    ("Random Fourier", 65536): 5.5e-6,
    ("Random Maclaurin", 65536): 8.8e-2,
}
# Milliseconds by n and method.
TABLE2 = {
    (10_000, "exp"): 1.4,
    (10_000, "quadratic"): 6.5,
    (10_000, "rff D=50"): 0.5,
    (10_000, "rff D=200"): 0.6,
    (10_000, "rff D=500"): 1.2,
    (10_000, "rff D=1000"): 1.4,
    (500_000, "exp"): 32.3,
    (500_000, "quadratic"): 8.2,
    (500_000, "rff D=50"): 1.6,
    (500_000, "rff D=200"): 1.7,
    (500_000, "rff D=500"): 2.0,
    (500_000, "rff D=1000"): 2.4,
}
# Precision at 1, 3 and 5 by data set and method.
TABLE3 = {
    ("AmazonCat-13k", "EXP"): (0.87, 0.76, 0.62),
    ("AmazonCat-13k", "Uniform"): (0.83, 0.69, 0.55),
    ("AmazonCat-13k", "Quadratic"): (0.84, 0.74, 0.60),
    ("AmazonCat-13k", "Rff"): (0.87, 0.75, 0.61),
    ("Delicious-200k", "EXP"): (0.42, 0.38, 0.37),
    ("Delicious-200k", "Uniform"): (0.36, 0.34, 0.32),
    ("Delicious-200k", "Quadratic"): (0.40, 0.36, 0.34),
    ("Delicious-200k", "Rff"): (0.41, 0.37, 0.36),
    ("WikiLSHTC", "EXP"): (0.58, 0.37, 0.29),
    ("WikiLSHTC", "Uniform"): (0.47, 0.29, 0.22),
    ("WikiLSHTC", "Quadratic"): (0.57, 0.37, 0.28),
    ("WikiLSHTC", "Rff"): (0.56, 0.35, 0.26),
}
# Validation perplexity on Penn Treebank after 10 epochs, and precision@1 on AmazonCat-13k.
NORMALIZATION = {"normalised": (120.0, 0.87), "not normalised": (126.0, 0.87)}
