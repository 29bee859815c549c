"""Loads a release in speculators' form with their package and says what it is.

python speculators_peer.py FOLDER      writes FOLDER/loaded.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from speculators.model import SpeculatorModel


def main(folder: Path) -> None:
    _, report = SpeculatorModel.from_pretrained(str(folder), output_loading_info=True)
    model = SpeculatorModel.from_pretrained(
        str(folder)
    )  # without the report it also takes the verifier's weights
    weights = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if tensor.is_floating_point()
    }
    save_file(weights, folder / "loaded.safetensors")
    said = {
        "class": type(model).__name__,
        "report": {name: sorted(map(str, found)) for name, found in report.items()},
        "layer_ids": list(model.target_layer_ids),
        "block_size": model.block_size,
        "mask_token_id": model.config.mask_token_id,
        "sliding": list(model.sliding_window_indices),
        "speculative_tokens": model.config.speculators_config.proposal_methods[0].speculative_tokens,
        "rope_theta": float(
            1.0 / model.rotary_emb.inv_freq[1].item() ** (model.config.transformer_layer_config.head_dim / 2)
        ),
    }
    (folder / "loaded.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
