"""Is this Flax model the same function as that PyTorch model, and if not, which line is wrong?

Importing this package loads neither framework.
"""

from parity.errors import DivergenceError as DivergenceError
from parity.errors import InputError as InputError
from parity.errors import MissingFrameworkError as MissingFrameworkError
from parity.errors import ParityError as ParityError
from parity.errors import TransferError as TransferError
from parity.evidence.compare import compare as compare
from parity.evidence.diagnose import diagnose as diagnose
from parity.evidence.diff import diff as diff
from parity.evidence.faults import Cause as Cause
from parity.evidence.faults import Diagnosis as Diagnosis
from parity.evidence.faults import Isolated as Isolated
from parity.evidence.faults import Isolation as Isolation
from parity.evidence.hypotheses.suspect import Suspect as Suspect
from parity.evidence.hypotheses.suspect import Variant as Variant
from parity.evidence.hypotheses.table import Hypothesis as Hypothesis
from parity.evidence.hypotheses.table import add_hypothesis as add_hypothesis
from parity.evidence.result import LEVELS as LEVELS
from parity.evidence.result import PROVES as PROVES
from parity.evidence.result import Diff as Diff
from parity.evidence.result import Report as Report
from parity.evidence.result import Trace as Trace
from parity.evidence.rule_check import RuleCheck as RuleCheck
from parity.evidence.rule_check import check_rule as check_rule
from parity.evidence.trace import trace as trace
from parity.suite import CaseResult as CaseResult
from parity.suite import SuiteResult as SuiteResult
from parity.suite import check as check
from parity.suite import environment as environment
from parity.weights import layouts as layouts
from parity.weights.ledger import add_rule as add_rule
from parity.weights.ledger import rules as rules
from parity.weights.rules import Alone as Alone
from parity.weights.rules import LeafRule as LeafRule
from parity.weights.rules import Rule as Rule
from parity.weights.settings import Agree as Agree
from parity.weights.settings import Check as Check
from parity.weights.settings import Require as Require
from parity.weights.transfer import Transfer as Transfer
from parity.weights.transfer import transfer as transfer
