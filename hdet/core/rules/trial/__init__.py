"""The rule inside `hdet.AutoLR`, in pieces: `rule` is what the others make up."""
