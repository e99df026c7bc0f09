"""pretrain_gpt.py with the fault that $FAULT plans."""

from pretrain_gpt import program
from tests.faults.injection import Plan, put_in, remember_engines

if __name__ == "__main__":
    remember_engines()
    with put_in(Plan.from_environment()):
        program()
