import torch
import rfsoftmax as rf

num_classes, dim = 100_000, 64
inputs, encoder = torch.randn(num_classes, dim), torch.nn.Linear(dim, dim)  # stand for your data and your model
head = rf.SoftmaxHead(dim, num_classes, num_negatives=100)  # replaces nn.Linear(dim, num_classes) and CrossEntropyLoss
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=4.0)
for step in range(301):
    target = (num_classes * torch.rand(128) ** 8).long()  # some classes are frequent, most are rare
    loss = head(encoder(inputs[target]), target)
    if step % 50 == 0: print(f"step {step}: sampled loss {loss:.3f}, exact loss {head.eval()(encoder(inputs[target]), target):.3f}")
    optimizer.zero_grad(), loss.backward(), optimizer.step(), head.train()
print("scores and classes:", head.topk(encoder(inputs[target[:1]]), k=3), "target:", target[:1])
