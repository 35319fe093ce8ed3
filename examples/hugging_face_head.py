"""A Hugging Face language model trained without its 50,000 logits: `SoftmaxHead` in place of `lm_head` and its loss.

The head takes over the weight of `lm_head`, here tied to the input embeddings, as it is: with `normalize=False` and
`tau=1` its logits are those of the model, so a pretrained model can be trained on, and afterwards `generate` and
`save_pretrained` work as before. Here the model is tiny, its weights are random, and nothing is downloaded.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rfsoftmax as rf

NUM_TOKENS, DIM, LENGTH = 50_000, 64, 16

torch.manual_seed(0)
FOLLOWERS = (NUM_TOKENS * torch.rand(NUM_TOKENS, 4) ** 6).long()  # each token is followed by one of four


def make_text(num: int) -> Tensor:
    tokens = [(NUM_TOKENS * torch.rand(num) ** 6).long()]
    while len(tokens) < LENGTH:
        tokens.append(FOLLOWERS[tokens[-1], torch.randint(4, (num,))])
    return torch.stack(tokens, 1)


sizes = {"hidden_size": DIM, "intermediate_size": 2 * DIM, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=NUM_TOKENS, tie_word_embeddings=True, **sizes)
model = LlamaForCausalLM(config)  # or AutoModelForCausalLM.from_pretrained(...)
head = rf.SoftmaxHead(DIM, NUM_TOKENS, num_negatives=500, tau=1, normalize=False, negatives="shared")
head.weight = model.get_output_embeddings().weight

# The weight is tied: the input embeddings add to its gradient, which stays sparse if theirs is. For a model that is
# not tied leave this line out; AdamW then takes the input embeddings as one of the layers.
model.get_input_embeddings().sparse = True
table = torch.optim.SparseAdam([head.weight], lr=0.002)
layers = torch.optim.AdamW([weight for weight in model.parameters() if weight is not head.weight], lr=0.002)


def next_token_loss(tokens: Tensor) -> Tensor:
    hidden = model.base_model(tokens).last_hidden_state
    loss: Tensor = head(hidden[:, :-1], tokens[:, 1:])  # each state predicts the token after it
    return loss


@torch.no_grad()
def report(when: str) -> None:
    model.eval(), head.eval()
    loss, same = next_token_loss(HELD_OUT), model(HELD_OUT, labels=HELD_OUT).loss
    print(f"exact loss {when} {loss:.3f} (by Hugging Face {same:.3f}), perplexity {loss.exp():.1f}")


HELD_OUT = make_text(64)
report("before")
model.train(), head.train()
for step in range(1, 251):
    loss = next_token_loss(make_text(32))
    table.zero_grad(), layers.zero_grad()
    loss.backward()
    table.step(), layers.step()
    if step % 50 == 0:
        print(f"step {step}: sampled loss {loss:.3f}")
report("after")

text = HELD_OUT[:, :4]
while text.shape[1] < LENGTH:
    scores, tokens = head.topk(model.base_model(text).last_hidden_state[:, -1], k=4)
    text = torch.cat([text, tokens.gather(1, torch.multinomial(scores.softmax(-1), 1))], 1)
known = (FOLLOWERS[text[:, 3:-1]] == text[:, 4:, None]).any(-1).float().mean()
print(f"{known:.0%} of the tokens generated may follow the one before; the first row: {text[0].tolist()}")
