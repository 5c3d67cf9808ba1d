"""Two questions about one long text: the text is computed once, and kept on disk.

python examples/prefix_reuse.py
"""

import tempfile
import time
from pathlib import Path

import chunkdelta
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate

# Any accelerated mlx-lm model; here the embedded one with seeded weights and a small vocabulary.
model = accelerate(embedded.build(vocab_size=4096))
text = [1 + 7 * i % 4000 for i in range(1500)]
questions = [[11, 12, 13], [21, 22, 23, 24]]

prefixes = chunkdelta.PrefixCache(max_bytes=1 << 30, fingerprint="embedded")
for question in questions:
    start = time.perf_counter()
    # The end of the text is where prompts part: a state is kept there.
    done = chunkdelta.prefill_with_prefixes(
        model, text + question, prefixes, model.make_cache, marks=[len(text)]
    )
    seconds = time.perf_counter() - start
    print(f"{done.reused} tokens reused, {done.computed} computed, {seconds:.2f} s")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "text.safetensors"
    hit = prefixes.lookup([*text, 0])
    size = chunkdelta.save_prefix(path, text[: hit.length], hit.cache, fingerprint="embedded")
    fresh = chunkdelta.make_cache(model, max_tokens=2048)
    loaded = chunkdelta.load_prefix(path, fresh, fingerprint="embedded")
    logits = chunkdelta.prefill(model, questions[0], fresh)
    print(f"{size / 1e6:.1f} MB on disk, {len(loaded)} tokens loaded, logits {logits.shape}")
