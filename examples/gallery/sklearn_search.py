"""Use scikit-learn: the closed form is an estimator for pipelines and grid searches."""

import matplotlib.pyplot as plt
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import duplex
from duplex.sklearn import CompositionClassifier

data = duplex.load_dataset("shapes.csv", images="shapes", encoder="tiny")
train = (data.manifest["split"] == "train").to_numpy()
X, y = data.features[train], data.manifest.loc[train, ["state", "object"]].to_numpy()
model = make_pipeline(Normalizer(), CompositionClassifier(candidates="seen"))
grid = {"compositionclassifier__shrinkage": [0.1, 1.0, 10.0, 100.0, 1000.0]}
search = GridSearchCV(model, grid, cv=KFold(3, shuffle=True, random_state=0)).fit(X, y)
print(search.best_params_, f"accuracy {search.best_score_:.1%}")
print(search.predict(X[:2]))  # state and object

figure, axes = plt.subplots(figsize=(3, 2.2), layout="constrained")
axes.semilogx(grid["compositionclassifier__shrinkage"], search.cv_results_["mean_test_score"], marker="o")
axes.set(xlabel="shrinkage", ylabel="accuracy, three folds")
figure.savefig("sklearn_search.png")
