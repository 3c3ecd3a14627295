"""Tests of the outbox on databases that hold on a work queue, too: all that need neither a connection, nor lanes,
dependencies or done jobs. They are collected here once more, and find the fixtures of this folder.
"""

from __future__ import annotations

from tests.outbox import test_admin, test_claims, test_put_many, test_puts
from tests.outbox.test_put_many import codec

__all__ = ["codec"]

PUTS = (
    "a_closed_or_unbound_outbox_says_so a_codec_that_fails a_function_must_name_one_queue "
    "a_key_is_free_once_its_row_is_deleted a_key_is_unique_in_its_queue buffers_are_bytes context_is_kept_as_json "
    "a_queue_is_named_by_the_function_that_consumes_it due_times ids_grow "
    "a_queue_that_is_not_known_here_is_read_with_the_default_codec of_an_unreadable_payload_only_the_payload_raises "
    "the_size_is_in_bytes_as_stored unknown_options unknown_queues validate_says_yes_or_no values_come_back "
    "values_that_json_changes_are_refused"
)
PUT_MANY = (
    "no_payloads_are_no_error thousands_in_order payloads_and_keys_of_any_kind_of_iterable a_key_for_each "
    "a_key_twice_is_an_error_of_the_caller the_jobs_there_are_returned_in_their_places only_jobs_there"
)
CLAIMS = (
    "the_most_urgent_of_several_queues no_more_than_asked_for no_more_of_a_queue_than_it_may_have a_thousand_at_most "
    "no_more_bytes_than_asked_for only_of_the_queues_that_are_asked_for nothing_is_claimed_before_it_is_due "
    "the_future_of_one_priority_hides_no_other nothing_of_a_paused_queue failed_jobs_come_again_earliest_first "
    "done_and_deleted what_is_given_back_was_not_tried a_retry_that_is_given_back_stays_one "
    "a_lease_that_is_over_is_a_failure a_renewed_lease_lasts_longer a_lease_that_is_renewed_at_the_last_moment "
    "two_find_the_same_lapse a_lapse_of_a_worn_out_job_is_its_death"
)
ADMIN = (
    "errors_the_oldest_failure_first get_and_find jobs_page_by_page retry_all_of_what_has_not_ended "
    "what_is_cancelled_while_it_runs_is_not what_is_not_found what_is_not_there what_runs_goes_on_in_a_pause "
    "wrong_arguments_of_jobs"
)
for module, names in ((test_admin, ADMIN), (test_puts, PUTS), (test_put_many, PUT_MANY), (test_claims, CLAIMS)):
    globals().update({f"test_{name}": getattr(module, f"test_{name}") for name in names.split()})
