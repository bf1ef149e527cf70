"""Jobs from trainings that were written for other libraries.

`lightning.from_module` takes a LightningModule with its LightningDataModule,
`transformers.from_model` a model of Hugging Face; both return a `Job` for `raytrain_opt.run`.
`common` has what they share. May import train, data, config and everything below; the libraries
themselves are not imported, so that no version of them is needed.
"""
