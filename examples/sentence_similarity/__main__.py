"""How similar are these sentences? MiniLM-L6 with every attention in libcuflash.

    python examples/sentence_similarity [sentence ...]

The embeddings are checked against the same encoder with attention in NumPy; the exit status is 1
if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np

import cuflash
from cuflash import cuda, raw

from attention import CpuAttention, CudaAttention
from minilm import MiniLM, installed_model, numpy_attention

SENTENCES = Path(__file__).with_name("sentences.txt").read_text().splitlines()
REQUIRED_COSINE = 0.9999
SECONDS_TO_MEASURE = 2.0


def choose_attention(name: str, stack: contextlib.ExitStack):
    if name == "auto":
        name = "cuda" if cuda.available() and built_with_cuda() else "cpu"
    if name == "cpu":
        return CpuAttention()
    return CudaAttention(stack.enter_context(cuda.Device(0)))


def built_with_cuda() -> bool:
    return any(kernel.built and not kernel.on_cpu for kernel in cuflash.kernels())


def paint(text: str, similarity: float) -> str:
    """Dark to bright green with the similarity, on a terminal that shows colours."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    shades = (236, 22, 28, 34, 40)
    shade = shades[min(len(shades) - 1, int(max(similarity, 0) * len(shades)))]
    return f"\033[48;5;{shade}m\033[38;5;{16 if shade == 40 else 255}m{text}\033[0m"


def print_table(sentences: list[str], embeddings: np.ndarray) -> None:
    similarity = embeddings @ embeddings.T
    print("\n    " + "".join(f"{column:^7}" for column in range(1, len(sentences) + 1)))
    for row, sentence in enumerate(sentences):
        cells = "".join(paint(f" {value:5.2f} ", value) for value in similarity[row])
        print(f"{row + 1:>3} {cells}  {sentence}")

    print("\nClosest pairs")
    rows, columns = np.triu_indices(len(sentences), k=1)
    for pair in np.argsort(-similarity[rows, columns])[: len(sentences) // 2]:
        row, column = rows[pair], columns[pair]
        print(f"  {similarity[row, column]:.2f}  {sentences[row]}  ~  {sentences[column]}")


def sentences_per_second(model: MiniLM, tokens: list[list[int]], attention) -> float:
    batch = tokens * 4
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS_TO_MEASURE:
        model.encode(batch, attention)
        count += len(batch)
    return count / elapsed


def main() -> int:
    parser = argparse.ArgumentParser(prog="sentence_similarity", description=__doc__.split("\n")[0])
    parser.add_argument("sentences", nargs="*", metavar="sentence", help="added to the built-in ones")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model", type=Path, help="folder with model.safetensors and tokenizer.json")
    arguments = parser.parse_args()
    sentences = SENTENCES + arguments.sentences

    with contextlib.ExitStack() as stack:
        attention = choose_attention(arguments.device, stack)
        print("MiniLM-L6: 6 layers, 12 heads of 32 channels; all attention in libcuflash")
        print(f"  library  {raw.cuflash_build_info().decode()}")
        print(f"  device   {attention.device}, {attention.dtype}")
        model = MiniLM(arguments.model or installed_model())
        tokens = model.tokenize(sentences)
        embeddings = model.encode(tokens, attention)
        print(f"  kernel   {', '.join(sorted(set(attention.kernels.values())))}")
        for sentence, ids in zip(sentences, tokens):
            if model.unknown_token in ids:
                print(f"  note     not all words are in the model's vocabulary: {sentence}")
        print_table(sentences, embeddings)

        cosines = (embeddings * model.encode(tokens, numpy_attention)).sum(axis=1)
        agrees = bool(cosines.min() >= REQUIRED_COSINE)  # a NaN does not
        verdict = "ok" if agrees else "FAILED"
        print("\nAgainst the same encoder with attention in NumPy")
        print(f"  smallest cosine {cosines.min():.7f}, required {REQUIRED_COSINE}: {verdict}")
        rates = [sentences_per_second(model, tokens, a) for a in (attention, numpy_attention)]
        print(f"  {rates[0]:.0f} sentences/s, with NumPy {rates[1]:.0f}")
    return 0 if agrees else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (cuda.Error, cuflash.Error) as error:
        sys.exit(f"sentence_similarity: {error}")
