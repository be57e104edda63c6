"""The logit lens equals decoding the states that transformers returns."""

import torch

from factscope.lm.forward import forward
from factscope.lm.model import LM
from factscope.tracing.lens import TOP, logit_lens

IDS = torch.tensor([[5, 9, 33, 71, 20], [5, 40, 12, 71, 20], [5, 41, 13, 71, 20]])


def test_every_state_is_decoded_in_every_family(lm: LM) -> None:
    run = forward(lm, IDS)
    lens = logit_lens(lm, [states[1:] for states in run.states], answer=7, at_once=2)
    states = torch.stack(run.states)[:, 1:]  # (layer, sample, token, width)
    p = lm.decode(states).softmax(-1).mean(1).transpose(0, 1)  # (token, layer, vocabulary)
    torch.testing.assert_close(torch.tensor(lens.answer), p[..., 7])
    best = p.topk(TOP)
    found = [[[float(text) for text, _ in cell] for cell in row] for row in lens.top]
    assert torch.equal(torch.tensor(found), best.indices.float())
    values = [[[p for _, p in cell] for cell in row] for row in lens.top]
    torch.testing.assert_close(torch.tensor(values), best.values)


def test_the_last_layer_predicts_what_the_model_predicts(lm: LM) -> None:
    run = forward(lm, IDS[:1])
    lens = logit_lens(lm, run.states, answer=7, at_once=100)
    logits = lm.model(IDS[:1]).logits[0].float()
    torch.testing.assert_close(
        torch.tensor(lens.answer)[:, -1], logits.softmax(-1)[:, 7], rtol=1e-5, atol=1e-7
    )
    assert [row[-1][0][0] for row in lens.top] == [str(i) for i in logits.argmax(-1).tolist()]
