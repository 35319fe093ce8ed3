import torch, rfsoftmax as rf

num_classes, dim = 100_000, 64
inputs = torch.randn(num_classes, dim)  # stands for your data
encoder = torch.nn.Linear(dim, dim)  # stands for your model
head = rf.SoftmaxHead(dim, num_classes, num_negatives=100)  # replaces nn.Linear(dim, num_classes) and CrossEntropyLoss
optimizers = torch.optim.Adam(encoder.parameters()), torch.optim.SparseAdam(head.parameters(), lr=0.1)
for step in range(300):
    target = (num_classes * torch.rand(256) ** 6).long()  # a few classes are frequent, most are rare
    head(encoder(inputs[target]), target).backward()
    [optimizer.step() or optimizer.zero_grad() for optimizer in optimizers]
print(head.eval()(encoder(inputs[target]), target), head.topk(encoder(inputs[target[:2]]), k=5))
