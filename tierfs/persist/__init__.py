"""Complete steps to the object tier, all or nothing: policy, commit, deletion, and the index of what is there."""
