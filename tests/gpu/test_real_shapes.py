"""On a GPU, with the shapes of real models: against oracles, with the same bits on every run, and whole steps as graphs."""

import dataclasses

import numpy as np
import pytest
import torch
from gpu_cases import PagedBatch, Place, Shape

LLAMA = Shape(heads=32, kv_heads=8, dim=128, layers=2)
REPEATS = 12


@pytest.fixture
def real(gpu):
    return Place("cuda", torch.bfloat16)


def same_bits(run):
    """The result; every repeat must have its bits. A race was once found that way, which a tolerance had let pass."""
    first = run().clone()
    for _ in range(REPEATS):
        assert torch.equal(run(), first)
    return first


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16, 33, 64, 130, 256])
def test_decode_attention(real, rows):
    from test_attention_kernels import decode

    contexts = real.rng.integers(0, 2000 if rows < 64 else 700, rows)
    batch = PagedBatch(real, LLAMA, contexts, [1] * rows)
    for split_tokens in (64, 256, 4096):
        out, wanted = decode(batch, LLAMA, split_tokens=split_tokens, order=np.argsort(-contexts))
        real.check(out, wanted)
        assert torch.equal(decode(batch, LLAMA, split_tokens=split_tokens)[0], out), "the order must not matter"
        for _ in range(3):
            assert torch.equal(decode(batch, LLAMA, split_tokens=split_tokens)[0], out)


@pytest.mark.parametrize(
    "shape", [LLAMA, Shape(heads=28, kv_heads=4, dim=128, layers=1), Shape(heads=9, kv_heads=3, dim=64, layers=1)]
)
def test_prefill_attention(real, shape):
    import plain

    from baton.worker.cuda.kernels.attention_prefill import attend_prefill, prefill_tiles, rows_per_tile

    batch = PagedBatch(real, shape, contexts=[0, 500, 1024, 3], counts=[300, 129, 64, 700])
    q = batch.store(0)
    wanted = plain.attend(q, batch.pool, 0, batch.tables, batch.slots, batch.starts, batch.contexts_t, scale=shape.scale)
    rows = rows_per_tile(shape.heads, shape.kv_heads, q.dtype)
    tiles = real.ints(prefill_tiles(np.arange(4), batch.counts, batch.contexts, rows))

    def run():
        out = real.poisoned(*wanted.shape)
        attend_prefill(
            q.flatten(1), batch.pool, 0, batch.tables, batch.slots, batch.starts, batch.contexts_t, tiles, out,
            heads=shape.heads, scale=shape.scale,
        )  # fmt: skip
        return out

    real.check(same_bits(run), wanted)


@pytest.mark.parametrize(
    ("outputs", "inputs", "paired"),
    [(6144, 4096, False), (4096, 4096, False), (4096, 14336, False), (28672, 4096, True), (128256, 4096, False)],
)
def test_products_of_one_row(real, outputs, inputs, paired):
    import plain

    from baton.worker.cuda.kernels.gemv import gemv

    x, norm = real.random(1, inputs), real.random(inputs)
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_().mul_(inputs**-0.5)
    wanted = plain.norm(x.double(), norm, 1e-5).float() @ weight.float().t()
    wanted = plain.silu_mul(wanted) if paired else wanted

    def run():
        out = real.poisoned(*wanted.shape)
        gemv(x, weight, out, norm=norm, eps=1e-5, paired=paired)
        return out

    real.check(same_bits(run), wanted)


@pytest.mark.parametrize("rows", [2, 8, 16, 32])
@pytest.mark.parametrize(
    ("outputs", "inputs", "paired"),
    [(6144, 4096, False), (4096, 4096, False), (4096, 14336, False), (28672, 4096, True), (128256, 4096, False)],
)
def test_products_of_few_rows(real, rows, outputs, inputs, paired):
    import plain

    from baton.worker.cuda.kernels.skinny_gemm import SkinnyScratch, skinny_gemm

    x, scratch = real.random(rows, inputs), SkinnyScratch(outputs, "cuda")
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_().mul_(inputs**-0.5)
    wanted = x.float() @ weight.float().t()
    wanted = plain.silu_mul(wanted) if paired else wanted

    def run():
        out = real.poisoned(*wanted.shape)
        skinny_gemm(x, weight, out, scratch, paired=paired)
        return out

    real.check(same_bits(run), wanted)


@pytest.mark.parametrize("rows", [1, 64, 256, 2048])
def test_fixed_products(real, rows):
    from baton.worker.cuda.kernels.fixed_gemm import FixedScratch, fixed_gemm

    scratch = FixedScratch(6144, "cuda")
    x, weight = real.random(rows, 4096), real.random(6144, 4096, scale=4096**-0.5)

    def run():
        out = real.poisoned(rows, 6144)
        fixed_gemm(x, weight, out, scratch)
        return out

    real.check(same_bits(run), x.float() @ weight.float().t())


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 20}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}, {"top_k": 1000}], ids=str
)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_draws_from_a_large_vocabulary(real, limits, spread):
    from test_sampling_kernels import choose, random_logits

    rows = 24
    logits = random_logits(real, rows, 128_256, spread)
    found, wanted = choose(real, logits, temperature=0.8, seed=np.arange(rows), position=np.arange(rows), times=2, **limits)
    different = np.flatnonzero(found != wanted)
    # e^x of the GPU and of numpy differ in the last bit: once in many thousand draws the uniform number falls between the two.
    assert len(different) <= 1, (found[different], wanted[different])


WIDE = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "dim": 128, "layers": 3, "vocabulary": 32000}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_logits_are_as_good_as_those_of_transformers(gpu, kind):
    """Both round to bfloat16 at other places; the judge is transformers in float32 with the same weights."""
    from step_rig import StepRig, make_models

    torch.manual_seed(5)
    shape = {**WIDE, "hidden": 2048, "inner": 768, "experts": (64, 8)} if kind == "qwen3_moe" else WIDE
    theirs, config, weights = make_models(kind, "cuda", torch.bfloat16, **shape)
    rig = StepRig(config, weights, context=1024, rows=1024)
    tokens = torch.randint(0, 32000, (700,)).tolist()
    _, first = rig.run({2: (0, tokens[:600]), 1: (0, tokens[:90])})
    _, one = rig.run({2: (600, [tokens[600]])}, bucket=1)
    _, two = rig.run({2: (601, [tokens[601]]), 1: (90, [tokens[90]])}, bucket=2)
    _, chunk = rig.run({2: (602, tokens[602:])})
    with torch.inference_mode():
        in_bf16 = theirs(torch.tensor([tokens], device="cuda")).logits[0].float()
        exact = theirs.float()(torch.tensor([tokens], device="cuda")).logits[0]
    errors = []
    for row, found in ((599, first[0]), (89, first[1]), (600, one[0]), (601, two[0]), (90, two[1]), (699, chunk[0])):
        scale = exact[row].norm()
        ours, other = (found - exact[row]).norm() / scale, (in_bf16[row] - exact[row]).norm() / scale
        errors.append((ours.item(), other.item()))
        assert kind == "qwen3_moe" or ours < min(0.03, 1.5 * other), (row, *errors[-1])
    # A row whose eighth and ninth experts are about equal may get another one, in theirs as in ours: not all rows do.
    ours, other = np.median(errors, axis=0)
    assert ours < 1.5 * other + 0.005, errors
    assert max(found for found, _ in errors) < 0.2, errors


class TestGraphs:
    @pytest.fixture
    def rigs(self, gpu):
        from step_rig import StepRig, make_models

        from baton.worker.cuda.graphs import DeviceSteps

        torch.manual_seed(6)
        _, config, weights = make_models("llama", "cuda", torch.bfloat16, **{**WIDE, "layers": 2})
        rig = StepRig(config, weights, slots=64, context=512, rows=2048, seed=8)
        return rig, DeviceSteps(rig.step)

    @staticmethod
    def batch(lengths, slots, token_ids=None, outputs=0):
        from baton.worker.cuda.step_inputs import StepBatch

        counts = np.ones(len(slots), np.int64) if token_ids is None else np.array([len(ids) for ids in token_ids])
        ids = np.full(len(slots), -1) if token_ids is None else np.concatenate(token_ids)
        starts = np.concatenate(([0], np.cumsum(counts)))
        due = np.ones(len(slots), bool)
        return StepBatch(ids, np.array(slots), starts, np.array(lengths), due, np.full(len(slots), outputs))

    def test_two_steps_ahead_as_one_by_one(self, rigs):
        """Tokens that feed back on the device, mixed steps between graphs, launched ahead: the same as one by one."""
        _, steps = rigs
        rng = np.random.default_rng(3)
        prompts = {slot: rng.integers(0, 32000, rng.integers(3, 40)).tolist() for slot in range(40)}
        late = rng.integers(0, 32000, 100).tolist()

        def generate(ahead):
            flying, found = [], []

            def launch(batch):
                flying.append(steps.launch(batch))
                if len(flying) == ahead:
                    done = flying.pop(0)
                    done.done.synchronize()
                    found.append(done.tokens.tolist())

            slots = list(prompts)
            lengths = [len(prompts[slot]) for slot in slots]
            launch(self.batch([0] * len(slots), slots, [prompts[slot] for slot in slots]))
            for step in range(4):
                launch(self.batch([length + step for length in lengths], slots, outputs=step + 1))
            mixed = [[-1]] * len(slots) + [late]
            launch(self.batch([length + 4 for length in lengths] + [0], [*slots, 50], mixed, outputs=5))
            for step in range(5, 9):
                launch(self.batch([length + step for length in lengths[::-1]], slots[::-1], outputs=step + 1))
            for one in flying:
                one.done.synchronize()
                found.append(one.tokens.tolist())
            return found

        wanted = generate(1)
        assert len({token for step in wanted for token in step}) > 100
        for ahead in (1, 2, 3):
            assert generate(ahead) == wanted

    def test_steps_with_prompts_as_graphs(self, rigs):
        """Of every size: one sequence, several, beside many that are decoded, and the last rows of a prompt."""
        rig, steps = rigs
        steps._mixed.capture(steps._record)
        assert torch.isnan(rig.pool.float()).all(), "recording writes nothing"
        rng = np.random.default_rng(4)
        lengths = rng.integers(1, 60, 48)
        steps.launch(self.batch([0] * 48, range(48), [rng.integers(0, 32000, n).tolist() for n in lengths]), recorded=False)
        for fresh, decoded in (([1], 0), ([20], 0), ([3, 5], 12), ([70], 1), ([200, 3], 48), ([9] * 10, 5), ([400, 33], 30)):
            contexts = [*lengths[:decoded], *[0] * len(fresh)]
            ids = [[7]] * decoded + [rng.integers(0, 32000, n).tolist() for n in fresh]
            slots = [*range(decoded), *range(48, 48 + len(fresh))]
            batch = self.batch(contexts, slots, ids)
            if batch.decodes:
                batch = dataclasses.replace(batch, of_prompt=np.ones(1, np.int64))
            assert steps._mixed.padding_for(batch) is not None
            found = []
            for recorded in (False, True):
                steps.launch(batch, recorded=recorded).done.synchronize()
                found.append(rig.step.logits(len(slots)).clone())
            assert torch.isfinite(found[0]).all()
            assert ((found[1] - found[0]).norm() / found[0].norm()).item() < 0.02

    def test_drawn_tokens_are_those_of_the_definition(self, rigs):
        from baton.worker import draws

        rig, steps = rigs
        rig.step.columns.draws.temperature.fill_(0.7)
        rig.step.columns.draws.top_p.fill_(0.9)
        rig.step.columns.draws.seed.copy_(torch.arange(64))
        slots = [7, 3, 9]
        steps.launch(self.batch([0, 0, 0], slots, [[1, 2, 3], [4, 5], [6]])).done.synchronize()
        launched = steps.launch(self.batch([3, 2, 1], slots, outputs=1))
        launched.done.synchronize()
        asked = np.zeros(3, draws.DRAW)
        asked["temperature"], asked["top_p"] = 0.7, 0.9
        words = [np.array(column, np.uint64) for column in (slots, [0, 0, 0], [1, 1, 1])]
        asked["uniform"] = draws.uniforms(*words)
        assert launched.tokens.tolist() == draws.choose(rig.step.logits(3).cpu().numpy(), asked).tolist()

    def test_tables_are_written_in_the_order_of_steps(self, rigs):
        rig, steps = rigs
        before = rig.step.tables.clone()
        steps.write_tables(np.array([1, 5, 5]), np.array([0, 2, 3]), np.array([11, 12, 13]))
        steps.stream.synchronize()
        before[1, 0], before[5, 2], before[5, 3] = 11, 12, 13
        assert torch.equal(rig.step.tables, before)
