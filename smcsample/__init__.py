"""Sequential Monte Carlo sampling from composed targets over token sequences."""

from smcsample.algorithm import Step, run, smc
from smcsample.demo import demo_models
from smcsample.feynman_kac import FeynmanKac
from smcsample.lm.agreement import Agreement, agreement
from smcsample.lm.causal_lm import CausalLM, load_model
from smcsample.lm.quantized import quantized
from smcsample.lm.tabular import TabularLM
from smcsample.mcmc import MCMC, Chains, metropolis_hastings
from smcsample.posterior import DeadPopulationError, Posterior
from smcsample.resampling import Status
from smcsample.rlhf import Samples, dataset, merge
from smcsample.sampling import sample
from smcsample.sequence import SequenceModel
from smcsample.source import Source
from smcsample.streaming import TextStream, stream
from smcsample.text_posterior import TextPosterior

__all__ = [
    "MCMC",
    "Agreement",
    "CausalLM",
    "Chains",
    "DeadPopulationError",
    "FeynmanKac",
    "Posterior",
    "Samples",
    "SequenceModel",
    "Source",
    "Status",
    "Step",
    "TabularLM",
    "TextPosterior",
    "TextStream",
    "agreement",
    "dataset",
    "demo_models",
    "load_model",
    "merge",
    "metropolis_hastings",
    "quantized",
    "run",
    "sample",
    "smc",
    "stream",
]
