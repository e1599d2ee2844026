"""What can go wrong, what must hold all the same, and the tests that show it.

A test is named by its node id below ``tests/``, or by as much of that as no other begins with.
"""

from __future__ import annotations

from dataclasses import dataclass

NOT_THERE = "needs a feature that is not there: "
"""How the reason begins for which no test covers a row, or a part of one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, the tests that cover it (one a line), and what of it they cannot, if anything."""

    number: int
    fault: str
    covered_by: str
    missing: str = ""

    @property
    def tests(self) -> list[str]:
        return self.covered_by.split()


ROWS = (
    Row(
        1,
        "a worker is killed between two steps",
        """
            integration/test_killed_worker.py::test_killed_worker_is_done_without_and_may_return_and
            faults/test_deaths.py::test_worker_killed_anywhere_in_its_code_costs_no_push
        """,
    ),
    Row(
        2,
        "a worker is killed while it computes",
        """
            integration/test_killed_worker.py::test_killed_worker_is_done_without_and_may_return_and
            faults/test_deaths.py::test_worker_killed_anywhere_in_its_code_costs_no_push
        """,
    ),
    Row(
        3,
        "a worker is killed in the middle of a push",
        """
            integration/test_killed_worker.py::test_killed_worker_is_done_without_and_may_return_and
            faults/test_deaths.py::test_worker_killed_anywhere_in_its_code_costs_no_push
            actors/test_link_chunks.py::test_push_of_which_something_was_lost_begins_again_with_its
        """,
    ),
    Row(
        4,
        "a worker is killed between its push and the answer",
        """
            integration/test_killed_worker.py::test_killed_worker_is_done_without_and_may_return_and
            faults/test_deaths.py::test_worker_killed_anywhere_in_its_code_costs_no_push
            faults/test_lost_messages.py::test_push_that_some_shard_never_got
            coordination/test_coordinator.py::test_accumulated_batch_of_a_worker_that_leaves_stays
            policies/test_sync_replicas.py::test_gradient_of_a_worker_that_rejoined_counts_once
        """,
    ),
    Row(
        5,
        "the answer to a push is lost",
        """
            simulation/test_schedules.py::test_everything_holds_whatever_is_drawn
            actors/test_link_resends.py::test_push_whose_reply_was_lost_is_sent_again
            faults/test_lost_messages.py::test_report_of_a_written_slice_that_is_lost
            faults/test_lost_messages.py::test_report_of_a_written_slice_that_is_refused
            faults/test_lost_messages.py::test_checkpoint_is_written_once_although
            faults/test_lost_messages.py::test_last_orders_that_are_lost_again_and_again
            faults/test_lost_messages.py::test_push_that_is_lost_again_and_again
            faults/test_lost_messages.py::test_pull_that_was_released_before_it_came
            faults/test_lost_messages.py::test_order_to_end_that_is_lost_is_given_to_workers
            faults/test_lost_messages.py::test_order_to_end_that_is_lost_is_given_to_the_ps
            faults/test_lost_messages.py::test_refusal_by_one_shard_is_heard
            coordination/test_coordinator.py::test_repeated_report_changes_nothing
        """,
    ),
    Row(
        6,
        "pushes come twice, or out of order",
        """
            simulation/test_schedules.py::test_everything_holds_whatever_is_drawn
            bad_input/test_wrong_messages.py::test_wrong_push_is_refused_and_a_right_one_counts
            actors/test_actor.py::test_push_answered_twice_harms_not_the_next_one
            simulation/test_checks.py::test_push_that_comes_twice_and_counts_twice_is_found
        """,
    ),
    Row(
        7,
        "a worker has a new life, and a push of the one before arrives",
        """
            bad_input/test_wrong_messages.py::test_push_of_another_life_is_refused
            coordination/test_coordinator.py::test_new_life_ends_the_one_before
            integration/test_lanes.py::test_worker_taken_for_dead_disturbs_nobody_when_it_goes_on
        """,
    ),
    Row(
        8,
        "a worker comes back under another number",
        """
            faults/test_deaths.py::test_worker_that_comes_back_under_another_number_takes_up_what
            policies/test_sync_replicas.py::test_worker_that_leaves_releases_the_barrier
        """,
    ),
    Row(
        9,
        "two workers, or all of them, are killed at once",
        """
            faults/test_deaths.py::test_deaths_that_come_together_cost_no_push
        """,
    ),
    Row(
        10,
        "a worker is killed again as soon as it is back",
        """
            faults/test_deaths.py::test_deaths_that_come_together_cost_no_push
            integration/test_lanes.py::test_killed_workers_leave_their_gradients_to_those_who_follow
        """,
    ),
    Row(
        11,
        "a worker joins in the middle of a step",
        """
            policies/test_sync_replicas.py::test_joiner_takes_part_from_the_next_step_on
            faults/test_lost_messages.py::test_worker_that_never_comes
            policies/test_policy_tables.py::test_joiner_starts_at_the_slowest_clock
            integration/test_late_start.py::test_late_tasks_are_waited_for_with_one_line
        """,
    ),
    Row(
        12,
        "a ps is killed: at rest, in an update, while a checkpoint is written or published",
        """
            integration/test_restarted_ps.py::test_killed_ps_goes_on_where_it_was
            simulation/test_schedules.py::test_ps_killed_anywhere_in_its_code
            store/test_changes.py::test_change_of_a_killed_process_is_finished_or_never_was
            store/test_checkpoint_commit.py::test_failure_at_any_step_of_a_save_leaves_the_earlier
            store/test_checkpoint_commit.py::test_next_life_saves_and_cleans_up_whatever_the_last
            store/test_checkpoint_commit.py::test_everything_is_flushed_before_it_is_published_and
            faults/test_deaths.py::test_ps_killed_between_a_drop_and_its_answer
            faults/test_lost_messages.py::test_ps_restarted_while_the_chief_begins
            faults/test_deaths.py::test_ps_killed_shortly_before_the_last_checkpoint
            faults/test_deaths.py::test_task_killed_while_a_checkpoint_is_written
        """,
    ),
    Row(
        13,
        "a ps and a worker are killed at once",
        """
            faults/test_deaths.py::test_deaths_that_come_together_cost_no_push
        """,
    ),
    Row(
        14,
        "a ps is back within a second: where it was, or elsewhere",
        """
            integration/test_restarted_ps.py::test_killed_ps_goes_on_where_it_was
            integration/test_restarted_ps.py::test_ps_on_an_empty_host_has_the_job_go_back_to_its
            transport/test_contract.py::test_peer_reaches_the_next_listener_at_its_address
            faults/test_resources.py::test_name_is_looked_up_until_it_is_there_and_again
        """,
        f"{NOT_THERE}a ps under another name or port than the job was started with",
    ),
    Row(
        15,
        "a ps has an older checkpoint than the workers' parameters",
        """
            integration/test_restarted_ps.py::test_ps_on_an_empty_host_has_the_job_go_back_to_its
            bad_input/test_wrong_messages.py::test_push_of_another_life_is_refused
            faults/test_deaths.py::test_workers_that_were_done_take_part_again
            faults/test_deaths.py::test_job_that_goes_back_from_another_policy
            faults/test_deaths.py::test_job_that_goes_back_to_one_checkpoint_twice
            store/test_retention.py::test_checkpoint_of_a_later_epoch_is_newer_than_one_of_a_higher
        """,
    ),
    Row(
        16,
        "the chief is killed: another one comes, late or never",
        """
            faults/test_deaths.py::test_job_waits_complete_for_a_chief_that_returns
            faults/test_lost_messages.py::test_ps_that_gives_up_leaves_nothing
            integration/test_supervised_tasks.py::test_job_of_honcho_ends_well_although_every_task
            bad_input/test_lost_tasks.py::test_killed_ps_ends_the_worker_and_the_chief
        """,
    ),
    Row(
        17,
        "a task stands still for less or for more than a lease",
        """
            faults/test_pauses.py::test_pause_shorter_than_a_lease_ends_no_life
            faults/test_lost_messages.py::test_worker_whose_lease_ran_out_hears_of_the_end
            faults/test_pauses.py::test_worker_that_stood_still_for_longer_than_its_lease_begins
            faults/test_pauses.py::test_ps_that_stood_still_for_longer_than_a_lease_takes_nobody_for
            integration/test_lanes.py::test_worker_whose_lease_ran_out_joins_again
            faults/test_pauses.py::test_task_that_stood_still_for_longer_than_a_ps_may_be_silent
            integration/test_lanes.py::test_worker_taken_for_dead_disturbs_nobody_when_it_goes_on
        """,
    ),
    Row(
        18,
        "tasks do not reach one another, in one direction or both, for less or more than a lease",
        """
            simulation/test_schedules.py::test_everything_holds_whatever_is_drawn
            faults/test_partitions.py::test_only_a_worker_that_is_not_heard_for_longer_than_its
            faults/test_partitions.py::test_cluster_that_falls_apart_goes_on_when_it_is_whole_again
            hosts/test_broken_links.py::test_worker_cut_off_for_longer
            hosts/test_broken_links.py::test_cut_shorter_than
        """,
    ),
    Row(
        19,
        "the network is slow beside the tensors",
        """
            faults/test_partitions.py::test_link_that_takes_half_a_lease_for_a_chunk
            faults/test_lost_messages.py::test_worker_that_is_told_to_stop_is_sent_no_parameters
            faults/test_lost_messages.py::test_ps_waits_for_goodbyes_as_long_as
            hosts/test_broken_links.py::test_slow_link_costs
        """,
        f"{NOT_THERE}a lease that suits a link which does not carry a chunk within it:"
        " the worker joins again for ever, unless it is given a longer --lease-s",
    ),
    Row(
        20,
        "workers push more than a ps takes in",
        """
            actors/test_link_chunks.py::test_no_more_than_the_credit_is_under_way_and_no_less_than
            actors/test_link_chunks.py::test_chunks_that_found_the_queue_full_are_sent_later
            actors/test_link_resends.py::test_request_that_found_the_queue_full_is_sent_later
            transport/test_router_dealer.py::test_full_queue_is_said_to_be_full
            bench/test_memory.py::test_slow_ps_is_stopped_as_often_as_asked_and_goes_on
        """,
    ),
    Row(
        21,
        "something blocks an event loop",
        """
            faults/test_pauses.py::test_event_loop_that_was_blocked_for_longer_than_a_lease
            actors/test_offload.py::test_loop_stays_free_while_work_runs
            metrics/test_health.py::test_stall_is_counted
        """,
    ),
    Row(
        22,
        "the wall clock is set by an hour",
        """
            faults/test_clock_jump.py::test_clock_that_is_set_by_an_hour_ends_no_life_and_no_job
            faults/test_clock_jump.py::test_numbers_of_lives_outlive_a_ps_whose
            faults/test_clock_jump.py::test_numbers_of_lives_outlive_a_ps_that
            roles/test_peers.py::test_life_after_a_restored_checkpoint_comes_after
        """,
    ),
    Row(
        23,
        "messages are damaged, cut, too large, of the wrong shape or kind",
        """
            wire/test_malformed.py::test_frames_that_are_no_envelope
            wire/test_malformed.py::test_wrong_tensor_is_refused
            wire/test_codec_laws.py::test_damaged_message_decodes_or_is_refused
            fuzz/test_corpus.py::test_input_keeps_the_laws_of_the_wire
            transport/test_router_dealer.py::test_frame_above_the_limit_ends_that_connection
            bad_input/test_hostile_bytes.py::test_hostile_messages_are_refused_and_the_worker
            bad_input/test_wrong_messages.py::test_wrong_push_is_refused_and_a_right_one_counts
        """,
        f"{NOT_THERE}a checksum of tensors on their way; TCP has one,"
        " and with keys every byte is authenticated",
    ),
    Row(
        24,
        "someone has no key, a wrong or a revoked one, or another's name; checking keys fails",
        """
            transport/test_secured.py::test_unknown_key_is_refused_and_both_ends_say_so
            transport/test_secured.py::test_end_without_keys_hears_that_they_are_needed
            transport/test_secured.py::test_key_revoked_live_is_neither_heard_nor_spoken_to_again
            transport/test_secured.py::test_while_keys_cannot_be_checked_nobody_gets_in_and_those
            actors/test_keys_of_peers.py::test_holder_of_a_key_is_heard_in_its_own_name_alone
            bad_input/test_hostile_bytes.py::test_address_of_another_connection_cannot_be_taken
            integration/test_security.py::test_who_does_not_belong_is_refused_with_the_reason
        """,
    ),
    Row(
        25,
        "a disk is full, fails or cannot be written; a checkpoint is torn, incomplete, damaged",
        """
            faults/test_resources.py::test_disk_without_room_costs_a_checkpoint
            store/test_checkpoint_commit.py::test_failure_at_any_step_of_a_save
            store/test_checkpoint_damage.py::test_every_flipped_bit_is_noticed
            store/test_checkpoint_damage.py::test_every_truncation_is_noticed
            store/test_checkpoint_damage.py::test_damaged_newest_checkpoint_falls_back_to_the_one
            bad_input/test_user_mistakes.py::test_logdir_lost_on_the_way_is_told
        """,
    ),
    Row(
        26,
        "no descriptor is left, a port is taken, a name is not there yet or changes its address",
        """
            faults/test_resources.py::test_task_may_open_as_many_files_as_the_system_lets_it
            faults/test_resources.py::test_listener_without_descriptors_keeps_its_peers_and_lets
            faults/test_resources.py::test_name_is_looked_up_until_it_is_there_and_again_when_its
            bad_input/test_wrong_starts.py::test_mistake_ends_in_its_exit_code_with_a_remedy
            cli/test_check_command.py::test_mistake_is_an_error
            cli/test_check_command.py::test_taken_port_is_an_error
        """,
    ),
    Row(
        27,
        "a user's model, data or update rule raises",
        """
            bad_input/test_user_mistakes.py::test_model_that_gives_no_gradients_is_named_with_the
            bad_input/test_user_mistakes.py::test_data_that_fails_is_named_with_the_line
            bad_input/test_user_mistakes.py::test_schedule_that_gives_no_rate_ends_the_job_with_what
            bad_input/test_wrong_starts.py::test_run_whose_worker_fails_says_where_its_work_is_saved
            bad_input/test_wrong_starts.py::test_bug_of_a_task_is_shown_with_its_traceback
        """,
    ),
    Row(
        28,
        "a task crashes more often than it may",
        """
            test_restarts.py::test_crashes_beyond_the_budget_end_with_the_last_ones_code
            test_restarts.py::test_peer_that_is_lost_again_and_again_is_given_up
            test_restarts.py::test_delay_doubles_up_to_the_longest_and_begins_anew_after_a_healthy
            integration/test_supervised_tasks.py::test_budget_that_is_used_up_ends_with_the_code
            actors/test_link.py::test_deadline_names_the_peer_its_address_and_the_reason
        """,
        f"{NOT_THERE}hosts that are avoided for a while; who starts tasks decides where",
    ),
    Row(
        29,
        "a worker is ten times as slow as the others",
        """
            policies/test_policy_tables.py::test_staleness_bound_holds_the_worker_that_runs_ahead
            policies/test_sync_replicas.py::test_backup_workers_late_gradients_are_dropped
            policies/test_sync_replicas.py::test_step_does_not_wait_for_a_worker_whose_gradient_will
            faults/test_lost_messages.py::test_steps_of_live_workers_may_take_longer
            simulation/test_checks.py::test_worker_that_is_too_far_ahead_is_found
            bench/test_simulate.py::test_looser_policies_bear_stragglers_better
        """,
    ),
    Row(
        30,
        "a task is told to end in the middle of a step",
        """
            faults/test_signals.py::test_worker_that_is_told_to_end_is_done_without_and_a_chief_ends
            faults/test_deaths.py::test_ps_that_is_told_to_end_alone_leaves_its_memory
            faults/test_deaths.py::test_chief_that_is_told_to_end_while_it_takes_over
            faults/test_deaths.py::test_chief_that_is_told_to_end_before_its_first_order
            faults/test_deaths.py::test_ps_that_leaves_lets_nobody_in
            faults/test_deaths.py::test_ps_that_ends_while_others_look_for_its_memory
            integration/test_honcho_runs.py::test_sigterm_of_honcho_leaves_a_checkpoint
            integration/test_resume.py::test_stopped_run_goes_on_as_if_undisturbed
            integration/test_supervised_tasks.py::test_sigterm_is_passed_on
            integration/test_run_endings.py::test_run_whose_terminal_is_closed_ends_in_order
            integration/test_run_endings.py::test_second_interrupt_ends_a_run_at_once
            coordination/test_close.py::test_gradients_under_way_are_counted_before_everyone
        """,
        f"{NOT_THERE}a second SIGTERM that hurries a task, to which honcho's come twice anyway",
    ),
    Row(
        31,
        "tasks are of neighbouring versions",
        """
            faults/test_skew.py::test_task_that_joins_a_ps_of_another_version_leaves_with_both
            faults/test_skew.py::test_ps_tells_a_task_of_another_version_both_and_waits_for_others
            faults/test_skew.py::test_task_whose_ps_comes_back_in_another_version_starts_again_and
            bad_input/test_intruders.py::test_worker_of_another_version_is_refused
            wire/test_golden_bytes.py::test_message_has_the_bytes_of_its_protocol_version
        """,
        f"{NOT_THERE}tasks of two versions in one job; all of them are brought up to date at once",
    ),
    Row(
        32,
        "a worker computes NaN or infinity",
        """
            store/test_finite.py::test_one_bad_element_anywhere_is_found
            coordination/test_coordinator.py::test_non_finite_gradient_is_skipped_with_its_batch
            coordination/test_coordinator.py::test_non_finite_gradient_does_not_move_a_clock
            bad_input/test_user_mistakes.py::test_non_finite_gradients_are_refused_until
        """,
    ),
    Row(
        33,
        "anything of this, at any time, for as long as one likes",
        """
            simulation/test_schedules.py::test_everything_holds_whatever_is_drawn
            simulation/test_schedules.py::test_every_kind_of_fault_is_drawn
            faults/test_soak.py::test_soak_goes_on_until_its_time_is_up_and_tells_what_failed
            faults/test_soak.py::test_soak_of_no_time_runs_nothing
            faults/test_soak.py::test_soak_exits_with_1_if_a_run_failed
        """,
    ),
)

INVARIANTS = {
    "each accepted push counts exactly once": """
        simulation/test_checks.py::test_update_that_is_made_twice_is_found
        simulation/test_checks.py::test_update_that_is_lost_is_found
        simulation/test_checks.py::test_dropped_push_that_is_called_applied_is_found
    """,
    "versions rise, and nobody is further ahead than the policy allows": """
        simulation/test_checks.py::test_worker_that_is_too_far_ahead_is_found
    """,
    "the parameters are those of an undisturbed run": """
        simulation/test_checks.py::test_sum_in_another_order_is_found_in_the_last_bit
        simulation/test_checks.py::test_batch_that_nobody_gets_is_found
    """,
    "nobody waits for ever": """
        simulation/test_checks.py::test_hang_is_found_with_those_who_wait
    """,
    "nothing is left behind": """
        test_local.py::test_nothing_is_left_running_after_a_run
        integration/test_lanes.py::test_consistent_reads_are_of_one_version_and_nothing_is_left
        bad_input/test_hostile_bytes.py::test_hostile_messages_leave_nothing_behind
    """,
    "an error names who is at fault": """
        simulation/test_checks.py::test_error_that_names_nobody_is_found
    """,
    "when nothing goes wrong any more, the job goes on to its end": """
        simulation/test_schedules.py::test_everything_holds_whatever_is_drawn
        simulation/test_checks.py::test_hang_is_found_with_those_who_wait
    """,
}
"""What must hold whatever happens, and the tests that show that it would be noticed."""
