"""Solutions of notebook 12."""


def rows_to_send(ids, rank_of_expert, num_ranks):
    counts = [0] * num_ranks
    for chosen in ids:
        for rank in {rank_of_expert[e] for e in chosen}:  # a set: each rank once
            counts[rank] += 1
    return counts


def local_ids(ids, first_expert, num_local):
    return [e - first_expert if 0 <= e - first_expert < num_local else -1 for e in ids]


def busiest(loads, ranks):
    copies = [sum(e in experts for experts in ranks) for e in range(len(loads))]
    return max(sum(loads[e] / copies[e] for e in experts) for experts in ranks)
