"""Train a small language model to please a reward, by weighted likelihood on posterior samples. No critic, no rollouts
thrown away.

Each round samples the model's own optimum for that reward, σ(x) ∝ π(x) exp(r(x)/β), and takes a gradient step on
−Σ W log π(x): the gradient of −log Z. Prompts whose weights rest on too few texts are skipped.

    python examples/reward_training.py        # half a minute on one core
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import smcsample as smc
from smcsample.potentials import LM, Reward

WORDS = ["<eos>", "the", "a", "cat", "dog", "bird", "sees", "hears", "likes", "and", "small", "old"]
PROMPTS = ["the cat sees", "a dog", "the old bird likes", "a small"]
BETA, LONGEST = 0.5, 10


def small_model(seed: int = 0) -> smc.CausalLM:
    """A random transformer of 20,000 parameters over a dozen words."""
    torch.manual_seed(seed)
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="the"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=0,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    return smc.load_model((LlamaForCausalLM(config), tokenizer), name="small")


def variety(texts: list[str]) -> list[float]:
    """One point for each animal named, once; minus a tenth per word."""
    animals = {"cat", "dog", "bird"}
    return [len(animals & set(text.split())) - 0.1 * len(text.split()) for text in texts]


def mean_reward(model: smc.CausalLM, seed: int) -> float:
    """E_π[r] over the prompts, from plain samples."""
    runs = smc.sample(PROMPTS, LM(model), n_particles=128, max_new_tokens=LONGEST, seed=seed, progress=False)
    return sum(sum(variety(run.texts)) / len(run) for run in runs) / len(runs)


def train(model: smc.CausalLM, steps: int, show: bool = True) -> None:
    optimiser = torch.optim.Adam(model.model.parameters(), lr=3e-3)
    for step in range(steps):
        target = LM(model) * Reward(variety, BETA)
        runs = smc.sample(PROMPTS, target, n_particles=64, max_new_tokens=LONGEST, seed=step, progress=False)
        trusted = [run for run in runs if run.samples().gate(min_ess=4) is None]
        if trusted:
            loss = torch.stack([run.loss(model) for run in trusted]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        if show and step % 20 == 0:
            value = BETA * sum(run.log_evidence for run in runs) / len(runs)
            kl = sum(run.kl() for run in runs) / len(runs)
            print(f"step {step:3}: soft value {value:5.2f}   KL(σ‖π) {kl:4.2f} nats   prompts used {len(trusted)}")


def main(steps: int = 100) -> tuple[float, float]:
    """Mean reward before and after."""
    model = small_model()
    before = mean_reward(model, seed=1)
    train(model, steps)
    after = mean_reward(model, seed=1)
    print(f"mean reward {before:.2f} -> {after:.2f} (3 animals in 3 words would be 2.7)")
    best = smc.sample(PROMPTS[0], LM(model) * Reward(variety, BETA), n_particles=32, max_new_tokens=LONGEST)
    print(f"{PROMPTS[0]} … {best.best()}")
    for pair in best.preference_pairs(margin=0.5)[:2]:
        print(f"prefer {pair['chosen']!r} to {pair['rejected']!r}")
    return before, after


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
