"""The child process of the rollout benchmark that runs vLLM; see `rollout_peers.VllmChild`."""

from __future__ import annotations

import json
import sys
import time

from unirl.torchvision_ops import declare_before_torchvision

ARCHITECTURE = "LlamaForCausalLM"


def main() -> None:
    """Load the model, then answer each line of work with the seconds that it took."""
    declare_before_torchvision()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import ModelRegistry

    directory, max_length = sys.argv[1], int(sys.argv[2])
    # A class that is registered needs no inspection in yet another process.
    ModelRegistry.register_model(ARCHITECTURE, ModelRegistry.models[ARCHITECTURE].load_model_cls())
    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=max_length,
        seed=0,
    )
    for line in sys.stdin:
        work = json.loads(line)
        settings = SamplingParams(
            max_tokens=work["length"], ignore_eos=True, temperature=1.0, detokenize=False, logprobs=0
        )
        started = time.perf_counter()
        made = llm.generate([{"prompt_token_ids": ids} for ids in work["ids"]], settings, use_tqdm=False)
        elapsed = time.perf_counter() - started
        if any(len(output.outputs[0].token_ids) != work["length"] for output in made):
            raise RuntimeError("vLLM ended a sequence early")
        sys.stdout.write(f"seconds {elapsed}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
