"""From gradients to new weights: buffers, clipping, loss scaling, update rules and schedules.

Everything here works on parameters with global names, independent of models; how a parameter is
split is read from its `split_by`. The caller decides every number (learning rate, weight decay)
from the samples consumed; nothing here counts iterations to decide anything.
"""
