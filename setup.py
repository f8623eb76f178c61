"""The folders of this repository as packages: ``pipeline/`` is ``penstock.pipeline``, and so on."""

from setuptools import find_packages, setup

FOLDERS = ("pipeline", "protocols", "services")

setup(
    package_dir={"penstock": "penstock", **{f"penstock.{folder}": folder for folder in FOLDERS}},
    packages=["penstock"]
    + [f"penstock.{folder}" for folder in FOLDERS]
    + [f"penstock.{folder}.{name}" for folder in FOLDERS for name in find_packages(folder)],
)
